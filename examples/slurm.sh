#!/bin/bash
# Runs examples/torchrun_fsdp2.py on 2 nodes with 8 GPUs each, as one learner of a run:
#   sbatch --export=ALL,SERVER=core.example.org:7070,NAME=eu-west examples/slurm.sh
# All ranks must reach SERVER. If a rank dies, torchrun restarts all of them. They join again under the same name,
# and continue with their optimizer's state from the folder "checkpoints", which must be on a shared file system.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise, restarts fail: pytorch issue 135712
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
    examples/torchrun_fsdp2.py --server "$SERVER" --name "$NAME" --tls certs/learner-"$NAME" \
    --checkpoints checkpoints
