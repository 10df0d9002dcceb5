#!/bin/sh
# What torchrun, srun or mpirun starts once on each node: the server on the first, an agent on every other. docs/several-machines.md
#
#   tessera-node.sh KEY_FILE [options of tessera-serve]
#
# MASTER_ADDR is the first node's address; torchrun sets it. AGENTS_PORT (50060) is where agents join. The server may take LINGER_SECONDS
# (40) to drain after SIGTERM, which launchers send to all nodes at once; agents end when it has been gone for LEAVE_SECONDS (30).
set -eu
key=$1
shift
node=${SLURM_NODEID:-${GROUP_RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}}}}
nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-${GROUP_WORLD_SIZE:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-}}}}}
if [ -z "$node" ] || [ -z "$nodes" ] || [ -z "${MASTER_ADDR:-}" ]; then
  echo "tessera-node.sh: no launcher says which node this is, of how many, and MASTER_ADDR" >&2
  exit 2
fi
join="$MASTER_ADDR:${AGENTS_PORT:-50060}"

if [ "$node" = 0 ]; then
  exec tessera-serve "$@" --nodes "$nodes" --agents-listen "$join" --agents-key-file "$key"
fi

# An agent that was killed is started again: the server waits for it and keeps its calls, where a launcher would end them all.
told=
trap 'told=yes; kill -TERM "$agent" 2>/dev/null || :' TERM INT
while :; do
  tessera-serve agent --join "$join" --node "$node" --key-file "$key" --linger-seconds "${LINGER_SECONDS:-40}" \
    --leave-after-seconds "${LEAVE_SECONDS:-30}" &
  agent=$!
  code=0
  wait "$agent" || code=$?
  while [ "$told" = yes ] && kill -0 "$agent" 2>/dev/null; do # the signal came while this waited
    code=0
    wait "$agent" || code=$?
  done
  if [ "$told" = yes ] || [ "$code" -le 128 ]; then
    exit "$code"
  fi
  echo "tessera-node.sh: the agent of node $node ended with $code, and is started again" >&2
  sleep 1
done
