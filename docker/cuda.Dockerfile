# sametoken on an NVIDIA GPU, built from the repository's root:
#   docker build -f docker/cuda.Dockerfile -t sametoken:cuda .
# PyTorch's wheels bring CUDA; the host brings the driver and the NVIDIA Container Toolkit.
# --build-arg TORCH_INDEX_URL=... names the index of another CUDA version, if the driver needs one.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:${PYTHON_VERSION}-slim
# Triton compiles the launcher of each kernel, against the headers of this image's Python.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX_URL=""
COPY constraints.txt /tmp/constraints.txt
RUN if [ -n "$TORCH_INDEX_URL" ]; then \
      pip install --no-cache-dir --index-url "$TORCH_INDEX_URL" -c /tmp/constraints.txt torch; \
    fi
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir -c /tmp/constraints.txt /wheel/*.whl
RUN useradd --create-home sametoken \
 && install -d -o sametoken -g sametoken /home/sametoken/.cache /home/sametoken/.triton
USER sametoken
WORKDIR /home/sametoken
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME ["/home/sametoken/.cache", "/home/sametoken/.triton"]
EXPOSE 8000
ENTRYPOINT ["sametoken"]
CMD ["--help"]
