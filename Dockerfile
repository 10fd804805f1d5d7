# zshard and its demo, on CPUs:
#     docker build -t zshard . && docker run --rm --shm-size 2g zshard
# Another torch: --build-arg TORCH=torch==2.14.1. For GPUs, start from an image with nvcc and pass CUDA=1 to make.
FROM python:3.11-slim-bookworm
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /zshard
COPY . .
RUN make build .venv/.demo TORCH="$TORCH" TORCH_INDEX="$TORCH_INDEX"
CMD ["make", "demo"]
