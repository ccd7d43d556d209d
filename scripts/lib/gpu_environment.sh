# Environment of processes on GPUs: source it in the shell that starts them, on every node. Variables that are set stay.
# accelerate's configuration files have no place for these. docs/guides/running_on_gpus.md explains each.

# Each CUDA stream has a hardware queue of its own, so that transfers run during computation.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
# NCCL executes the operations of several communicators in the order of their launch (NCCL 2.26 and later).
export NCCL_LAUNCH_ORDER_IMPLICIT="${NCCL_LAUNCH_ORDER_IMPLICIT:-1}"
# When a rank is lost: end the process after the timeout (3), and write what each rank had launched.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
