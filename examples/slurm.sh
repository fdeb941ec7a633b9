#!/bin/bash
# A job of Slurm: one smpc run on every node, which starts a rank for each GPU of its node.
#
#     sbatch --nodes 4 --gpus-per-node 8 examples/slurm.sh examples/train_gpt2.py
#
# Nodes, this node's number, the master and its port come from srun (docs/launching.md). The first rank of each node is shown in the
# job's output; every rank's streams are in logs/. --kill-on-bad-exit ends all nodes where a launcher is lost, with its node.
#SBATCH --job-name=smpc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
set -euo pipefail

logs=logs/$SLURM_JOB_ID
srun --kill-on-bad-exit=1 smpc run --stdout "$logs/{rank}.out" --stderr "$logs/{rank}.err" "$@"
