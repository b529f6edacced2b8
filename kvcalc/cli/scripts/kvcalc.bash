# kvcalc completion for bash: eval "$(kvcalc completion bash)"
_kvcalc() {
    local line="${COMP_LINE:0:COMP_POINT}" head="" part char reply
    local -a words
    IFS=$' \t\n' read -r -a words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local typed="${words[${#words[@]}-1]}" files=0 nospace=0
    # bash replaces only what follows the last of these characters, and @ itself.
    for char in : = @; do
        if [[ $COMP_WORDBREAKS == *"$char"* && $typed == *"$char"* ]]; then
            part="${typed%"${typed##*"$char"}"}"
            [[ $char == @ ]] && part="${part%@}"
            (( ${#part} > ${#head} )) && head="$part"
        fi
    done
    COMPREPLY=()
    while IFS= read -r reply; do
        case "$reply" in
            :files) files=1 ;;
            :nospace) nospace=1 ;;
            *) reply="${reply%%$'\t'*}"; COMPREPLY+=("${reply#"$head"}") ;;
        esac
    done < <("${words[0]/#\~/$HOME}" completion words -- "${words[@]:1}" 2>/dev/null)
    if (( files )); then
        compopt -o filenames 2>/dev/null
        while IFS= read -r reply; do COMPREPLY+=("$reply"); done < <(compgen -f -- "${typed#"$head"}")
    fi
    (( nospace )) && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _kvcalc kvcalc
