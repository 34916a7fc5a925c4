# Removes an engine's folder and the shared-memory segments that it names: FOLDER SEGMENTS [when-input-ends].
# A segment's name begins with that of a file in the folder that vLLM's processes met through, or is listed in its file `names`,
# of which nothing else is removed than what vLLM names so in SEGMENTS.
# With a third argument it returns at once, prints the number of a process that stays in the background, and that one removes
# them a second after standard input has ended.

remove() {
    for met in "$1"/vllm_dist_*; do rm -f -- "$2/${met##*/}"*; done
    if [ -f "$1/names" ]; then
        while read -r name; do
            case "${name#"$2"/}" in
                */*) ;;
                psm_* | vllm_dist_*) rm -f -- "$2/${name#"$2"/}" ;;
            esac
        done < "$1/names"
    fi
    rm -rf -- "$1"
}

if [ -z "$3" ]; then
    remove "$1" "$2"
else
    exec 3<&0
    ( read -r _ <&3; sleep 1; remove "$1" "$2" ) &
    echo $!
fi
