# For launch scripts: given FLAG DEFAULT ARGUMENTS... prints the flag's last value among the arguments, else the default.
given() {
    local flag=$1 value=$2
    shift 2
    while (($#)); do
        case $1 in
        "$flag") value=${2-} ;;
        "$flag="*) value=${1#*=} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

# warm_up DEFAULT ITERS ARGUMENTS... prints --lr-warmup-iters: the default, or half of a run that is not longer than it.
warm_up() {
    local warm_up=$1 iters=$2
    shift 2
    if [[ $iters =~ ^[0-9]+$ && -z $(given --lr-warmup-iters "" "$@") ]] && ((10#$iters <= warm_up)); then
        echo "--lr-warmup-iters is $((10#$iters / 2)) instead of $warm_up: the run has $iters steps" >&2
        warm_up=$((10#$iters / 2))
    fi
    printf '%s' "$warm_up"
}
