#compdef kvcalc
# kvcalc completion for zsh: eval "$(kvcalc completion zsh)" after compinit
_kvcalc() {
    local reply files=0 found=1
    local -a candidates flags
    for reply in "${(@f)$(${~words[1]} completion words -- "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
        case "$reply" in
            '') ;;
            :files) files=1 ;;
            :nospace) flags=(-S '') ;;
            *) candidates+=("${${reply//:/\\:}/$'\t'/:}") ;;
        esac
    done
    (( $#candidates )) && _describe -V 'kvcalc' candidates $flags && found=0
    (( files )) && _files && found=0
    return found
}
if [ "${funcstack[1]}" = "_kvcalc" ]; then
    _kvcalc "$@"
else
    compdef _kvcalc kvcalc
fi
