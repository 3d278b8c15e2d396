#!/bin/sh
# Submits worker tasks in place of those that have ended, until the fleet's head job has ended.
#   top_up.sh RUN [SECONDS [HEADRACE]]
# For partitions that preempt or limit the time of jobs. Run it where sbatch works and a process may live on: in tmux on a
# login node, or in the head's own allocation. SECONDS is the pause between two looks, by default 60.

run=${1:?usage: top_up.sh RUN [SECONDS [HEADRACE]]}
no_run=7       # exit code RUN_DIR: there is no such run, or its head job has ended
unreachable=9  # exit code UNREACHABLE: Slurm's controller does not answer now

while :; do
    "${3:-headrace}" slurm scale --run-dir "$run"
    code=$?
    case $code in
        0 | "$unreachable") sleep "${2:-60}" ;;
        "$no_run") exit 0 ;;
        *) exit "$code" ;;
    esac
done
