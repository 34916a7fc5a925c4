# Remove an engine's folder and its shared-memory segments: FOLDER SEGMENTS [when-input-ends].
# A segment's name starts with that of a vllm_dist_* file in the folder, or its path is a line of the folder's
# file `names`; of these lines only vLLM's names directly in SEGMENTS are removed.
# With a third argument print the pid of a background process and exit; it removes them one second after
# standard input ends.

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
