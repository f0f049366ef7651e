# oomb for NVIDIA GPUs. Build: docker build -t oomb .
# Run: docker run --gpus all --ulimit memlock=-1 -v "$PWD:/work" oomb train --config my.toml
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo install --locked --root /opt/oomb --path crates/oomb

# NVRTC and cuBLASLt of CUDA 13 are opened at run time; the driver comes from the host.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends cuda-nvrtc-13-0 libcublas-13-0 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/oomb/bin/oomb /usr/local/bin/oomb
# Kernels are compiled for the GPU found and kept in the cache: give it a volume to keep them between containers.
ENV XDG_CACHE_HOME=/cache
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["oomb"]
CMD ["doctor"]
