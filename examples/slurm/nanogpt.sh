#!/bin/bash
# Two nodes, one rank on each. When a node or a rank fails, when the job is preempted, and a minute before its time is
# over, it goes back into the queue, at most ten times, and on from its checkpoint:
#
#     sbatch examples/slurm/nanogpt.sh FOLDER --steps 5000      # FOLDER is on a file system that all nodes share
#
#SBATCH --job-name=nanogpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR2@60

export SYNCLINE_ON_PREEMPTION=checkpoint # at the signal, and when Slurm ends the ranks
SYNCLINE_SECRET=$(head -c 32 /dev/urandom | base64)
export SYNCLINE_SECRET # srun hands it to the ranks

srun python examples/nanogpt.py "$@" && exit
[ "${SLURM_RESTART_COUNT:-0}" -lt 10 ] && scontrol requeue "$SLURM_JOB_ID"
