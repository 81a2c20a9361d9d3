# Fulgurite for GPUs of NVIDIA: `fulgurite` and `gpu-check`, on CUDA 12 or 13.
#
#     docker build -f docker/cuda.Dockerfile -t fulgurite .
#     docker build -f docker/cuda.Dockerfile --build-arg CUDA=12.8.1 -t fulgurite:cuda12 .
#     docker run --gpus all --shm-size=1g --ulimit memlock=-1 fulgurite gpu-check --only platform
#
# CUDA must not be newer than what `nvidia-smi` shows on the machines that run it. COMPUTE_CAP=80 runs on Ampere and newer;
# 90 is for Hopper alone.
ARG CUDA=13.0.1
ARG UBUNTU=24.04

FROM nvidia/cuda:${CUDA}-devel-ubuntu${UBUNTU} AS build
ARG COMPUTE_CAP=80
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates curl g++ \
    && rm -rf /var/lib/apt/lists/*
RUN curl -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal
ENV PATH=/root/.cargo/bin:$PATH
WORKDIR /src
COPY . .
# There is no GPU while an image is built: the driver's library is the toolkit's stand-in, and the architecture is given.
ENV CUDA_COMPUTE_CAP=${COMPUTE_CAP} LIBRARY_PATH=/usr/local/cuda/lib64/stubs
RUN cargo build --release --locked -p fulgurite-cli -p fulgurite-gpu-check --features fulgurite-cli/cuda,fulgurite-gpu-check/cuda

# The runtime image has cudart, cuBLAS, cuRAND, NVRTC and NCCL.
FROM nvidia/cuda:${CUDA}-runtime-ubuntu${UBUNTU}
COPY --from=build /src/target/release/fulgurite /src/target/release/gpu-check /usr/local/bin/
WORKDIR /work
CMD ["gpu-check"]
