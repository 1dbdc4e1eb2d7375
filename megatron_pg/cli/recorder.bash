# Read by every bash of a recorded script before its first line (BASH_ENV): commands are recorded and do nothing.
# It must work under whatever the script sets (-e, -u, -C, IFS), so every name is __pg's own.
# $__PG holds bin/ (all of PATH), functions (a stub for every command that may be called) and records/.

PATH=$__PG/bin
# Where a stub is called that `exec` starts. Only there the exported LINENO is fresh, so the shell's number goes with it.
export LINENO __PG_SHELL=$BASHPID __PG_FILE=${__PG_OUTER_FILE:-$0}
__pg_calls=0

# Record one call: the folder; file and line; "read" where a pipe or $(…) takes its output; "followed" where the shell
# that it would start is run; its words. A loop that waits for what never comes is recorded no longer.
__pg_record() {
    ((__pg_calls++ < 2000)) || return 0
    { printf '%s\0' "$PWD" "$@" >|"$__PG/records/${EPOCHREALTIME//[!0-9]/}.$BASHPID"; } 2>/dev/null || :
}

# Usage: __pg_stub file line command words…
__pg_stub() {
    local __pg_file=${1:-${__PG_OUTER_FILE-}} __pg_line=$2 __pg_read='' __pg_inner=()
    [[ $1 ]] || __pg_line=${__PG_OUTER_LINE:-$2} # the text of `bash -c`
    [[ ! -p /dev/stdout ]] || __pg_read=read
    shift 2
    __pg_shell_within "$@"
    __pg_record "$__pg_file" "$__pg_line" "$__pg_read" "${__pg_inner[0]:+followed}" "$@"
    case ${1##*/} in
    tee) cat ;;
    *) [[ ! ${__pg_inner[0]:+x} ]] || __pg_follow "$@" ;;
    esac
}

# What bash would be told by a command that starts one, in __pg_inner, after the number of words before it.
__pg_shell_within() {
    local __pg_i
    case ${1##*/} in
    bash | sh) __pg_inner=(0 "${@:2}") && return ;;
    srun | sbatch | nohup | env | timeout | sudo | nice | ionice | numactl | taskset | stdbuf | setsid | time) ;;
    mpirun | mpiexec | ray | docker | podman | apptainer | singularity | enroot) ;;
    *) return 0 ;;
    esac
    for ((__pg_i = 2; __pg_i <= $#; __pg_i++)); do
        case ${!__pg_i} in
        bash | sh | */bash | */sh) __pg_inner=("$__pg_i" "${@:__pg_i+1}") ;;
        --wrap=*) __pg_inner=("$__pg_i" -c "${!__pg_i#--wrap=}") ;;
        --wrap) __pg_inner=("$__pg_i" -c "${@:__pg_i+1:1}") ;;
        *.sh | *.sbatch | *.slurm) [[ ! -f ${!__pg_i} ]] || __pg_inner=("$__pg_i" "${@:__pg_i}") ;;
        esac
        [[ ! ${__pg_inner[0]:+x} ]] || return 0
    done
    [[ ${1##*/} != sbatch ]] || __pg_inner=(0 -s) # the job on the standard input
}

__pg_follow() (
    for ((__pg_i = 2; __pg_i < __pg_inner[0]; __pg_i++)); do # env NAME=VALUE bash …
        [[ ! ${!__pg_i} =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] || export "${!__pg_i}"
    done
    export __PG_OUTER_FILE=$__pg_file __PG_OUTER_LINE=$__pg_line
    __pg_bash "${__pg_inner[@]:1}"
)

# bash itself, without the options that would read profiles.
__pg_bash() {
    local __pg_options=()
    while [[ ${1-} == [-+]?* && $1 != -- ]]; do
        case $1 in
        --login | -[li] | -li | -il) ;;
        --*) __pg_options+=("$1") ;;
        *[oO]) __pg_options+=("$1" "${2-}") && shift ;;
        *) __pg_options+=("${1//[li]/}") ;;
        esac
        shift
    done
    "$__PG_BASH" ${__pg_options[@]+"${__pg_options[@]}"} "$@"
}

# A tool, unless its words hold what makes it write a file or wait for ever.
__pg_tool() {
    local IFS=' '
    if [[ " ${*:5}" =~ $1 ]]; then __pg_stub "${@:2}"; else PATH=$__PG/bin command "${@:4}"; fi
}

. "$__PG/functions"
