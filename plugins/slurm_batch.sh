#!/bin/bash
# What Slurm runs for one job of the launcher `slurm`: sbatch OPTIONS slurm_batch.sh PYTHON STAGE_JOB SETTINGS FOLDER
# It may run several times for one job: after a pre-emption, a lost node or its own time limit Slurm puts the job into the queue again.
python=$1 stage_job=$2 settings=$3 folder=$4
# The record of the time before, when the job was stopped by Slurm and not by itself.
[ ! -e "$folder/exit.json" ] || mv "$folder/exit.json" "$folder/exit.$SLURM_RESTART_COUNT.json"
# Where the processes of a training run on several nodes meet (plugins/slurm_launcher.py). The address that Slurm itself uses for the first node.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
limit=
trap 'limit=1; kill -TERM "$job" 2>/dev/null' USR1   # the time limit is near (--signal)
trap 'kill -TERM "$job" 2>/dev/null' TERM            # pre-emption, scancel
"$python" -I -S "$stage_job" "$settings" &
job=$!
while kill -0 "$job" 2>/dev/null; do wait "$job"; done
# Code 75: the stage was stopped and has saved. Out of time, it goes on in a next turn; one that cannot save would begin for ever. torchrun
# hides the code, and starts nothing but training, which saves.
if [ -n "$limit" ] && { grep -q '"code": 75' "$folder/exit.json" 2>/dev/null ||
    { [ "$SLURM_NNODES" -gt 1 ] && grep -q '"stopped": "signal"' "$folder/exit.json" 2>/dev/null; }; }; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 300    # ended by the requeue
fi
grep -q '"code": 0,' "$folder/exit.json" 2>/dev/null
