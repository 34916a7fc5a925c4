#!/usr/bin/env bash
# GRPO on a mixture-of-experts model over several nodes: Megatron and vLLM on the same GPUs, Ray between the nodes.
#
#   sbatch --nodes=1  slurm/qwen3_moe_grpo.sh configs/qwen3_30b_a3b.yaml run.name=first
#   sbatch --nodes=16 slurm/qwen3_moe_grpo.sh configs/qwen3_235b_a22b.yaml run.name=first
#
# The number of nodes is training.layout's world size and launch.engine_slots over the GPUs of a node (`mrl plan` says it): preflight refuses fewer,
# and names those that would idle. With launch.elastic and --nodes=14-16 a job whose node has died goes on with what is left.
#
# Everything after the script's name goes to `mrl train`. Submit from the repository's folder, as often as the run needs
# jobs: they queue behind each other (singleton, by job name) and each resumes where the last one saved.
#
# Before the time limit Slurm sends USR1 here; the driver finishes its step, saves and leaves with code 99, and the job goes
# back into the queue. Code 2 (bad configuration or data) ends the job; any other failure is queued again, a few times.
#
# Edit the next lines for your site (partition, account, GPUs per node, time). --exclusive alone gives a job neither all of
# a node's memory, which off-loaded weights and optimizer state need, nor its GPUs.
#SBATCH --job-name=qwen3-moe-grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --dependency=singleton
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out
##SBATCH --gpus-per-node=8

set -euo pipefail

# What may be set from outside (sbatch --export=ALL,MRL_PYTHON=...).
cd "${MRL_HOME:-$SLURM_SUBMIT_DIR}"
PYTHON=${MRL_PYTHON:-.venv/bin/python}             # the environment's interpreter, the same path on every node
CPUS=${SLURM_CPUS_ON_NODE:-1}                      # all of the job's for the one task of a node
PORT_BASE=${MRL_PORT_BASE:-12000}                  # node n uses PORT_BASE + 200 n and the 199 ports above
MAX_FAILURES=${MRL_MAX_FAILURES:-3}                # failures (not time limits) after which the job stays down
LOGS=$(realpath -m "${MRL_LOGS:-runs/slurm}")/${SLURM_JOB_NAME}-${SLURM_JOB_ID}

REQUEUE=99                                         # the driver's "put me back", see launch/commands/stopping.py
ATTEMPT=${SLURM_RESTART_COUNT:-0}
LOG=$LOGS/attempt-$ATTEMPT
mkdir -p "$LOG"
rm -f "$LOG/stop"
ln -sfn "attempt-$ATTEMPT" "$LOGS/latest"

say() { printf '%s  %s\n' "$(date '+%F %T')" "$*"; }

back_into_the_queue() {
  say "back into the queue"
  scontrol requeue "$SLURM_JOB_ID" || say "scontrol requeue failed: submit again by hand, the run resumes"
}

# Called by the trap: ends the Ray nodes of this job and nothing else, then decides by the exit code.
# shellcheck disable=SC2317
leave() {
  local code=$?
  trap - EXIT
  trap '' TERM USR1
  if [ -n "$NODES_PID" ]; then
    touch "$LOG/stop"
    for _ in {1..60}; do
      kill -0 "$NODES_PID" 2>/dev/null || break
      sleep 1
    done
    kill -TERM "$NODES_PID" 2>/dev/null || true
    wait "$NODES_PID" || true
  fi
  say "leaving with code $code"
  case $code in
    0 | 2 | 3 | 4 | 130 | 143) ;; # done, wrong input, ended by a rule, nothing learned, told to end: the same again would say the same
    "$REQUEUE") back_into_the_queue ;;
    *)
      echo "attempt $ATTEMPT: code $code" >>"$LOGS/failures"
      if [ "$(wc -l <"$LOGS/failures")" -lt "$MAX_FAILURES" ]; then
        back_into_the_queue
      else
        say "failed $MAX_FAILURES times: not again"
      fi
      ;;
  esac
  exit "$code"
}
NODES_PID=
trap leave EXIT

# Called by the traps: USR1 and TERM are for the driver; before it runs there is nothing to save.
# shellcheck disable=SC2317
forward() {
  say "signal $1"
  if [ -n "$DRIVER_PID" ]; then
    kill -s "$1" "$DRIVER_PID" 2>/dev/null || true
  elif [ "$1" = USR1 ]; then
    exit "$REQUEUE"
  else
    exit 143
  fi
}
DRIVER_PID=
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# `wait` returns early when a trapped signal arrives: wait again until the process is really gone.
finish() {
  local code=0
  while :; do
    wait "$1" && code=0 || code=$?
    kill -0 "$1" 2>/dev/null || break
  done
  return "$code"
}

say "job $SLURM_JOB_ID attempt $ATTEMPT on $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST"
say "logs in $LOG"

run() {
  local code=0
  RAY_ADDRESS=$HEAD "$PYTHON" -m "$@" &
  DRIVER_PID=$!
  finish "$DRIVER_PID" || code=$?
  DRIVER_PID=
  if [ "$code" = 138 ]; then # USR1 before it was listened to: nothing to save
    code=$REQUEUE
  fi
  return "$code"
}

HEAD=
# Words that launch.elastic has for a run on fewer nodes than its layout is for; mostly none.
"$PYTHON" -m mrl.launch.slots --nodes "$SLURM_JOB_NUM_NODES" "$@" >"$LOG/elastic"
while IFS= read -r word; do set -- "$@" "$word"; done <"$LOG/elastic"
say "phase check: configuration, kept in config.yaml"
run mrl.cli train "$@" --dry-run >"$LOG/config.yaml"

# One secret for this attempt: only who knows it can talk to the cluster.
RAY_AUTH_TOKEN=$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# This shell runs on the first node, where the head is.
setting() { "$PYTHON" -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["launch"][sys.argv[2]] or 0)' "$LOG/config.yaml" "$1"; }
SLOTS=$(setting slots_per_node) # 0: the node's GPUs, as torch sees them there
STORE=$(setting object_store_bytes)
HEAD=${MRL_HEAD:-$("$PYTHON" -c 'from mrl.launch.cluster.ray_node import own_address; print(own_address())')}:$PORT_BASE
say "phase ray: head $HEAD"
# shellcheck disable=SC2016  # $SLURM_PROCID is each task's own
srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --cpus-per-task="$CPUS" --mem=0 --kill-on-bad-exit=1 --output="$LOG/node-%n.log" \
  bash -c 'exec "$0" -m mrl.launch.cluster.ray_node --number "$SLURM_PROCID" --head "$1" --slots "$2" --object-store-bytes "$3" --port-base "$4" --until "$5"' \
  "$PYTHON" "$HEAD" "$SLOTS" "$STORE" "$PORT_BASE" "$LOG/stop" &
NODES_PID=$!

say "phase preflight"
run mrl.launch.preflight "$@" --nodes "$SLURM_JOB_NUM_NODES"
say "phase train"
run mrl.cli train "$@"
