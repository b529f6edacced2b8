# kvcalc completion for fish: kvcalc completion fish | source
function __kvcalc_complete
    set -l typed (commandline -ct)
    set -l words (commandline -opc)
    for reply in ($words[1] completion words -- $words[2..-1] "$typed" 2>/dev/null)
        switch $reply
            case ':files'
                __fish_complete_path "$typed"
            case ':nospace'
            case '*'
                echo $reply
        end
    end
end
complete -c kvcalc -f -a '(__kvcalc_complete)'
