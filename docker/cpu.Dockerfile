# sametoken on a CPU, built from the repository's root:
#   docker build -f docker/cpu.Dockerfile -t sametoken:cpu .
# --build-arg TORCH_INDEX_URL=... names PyTorch's index of CPU wheels, a tenth of the default's size.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:${PYTHON_VERSION}-slim
# The CPU kernels are compiled on their first use.
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
# The cache holds compiled kernels, which no other user may write, and fetched models.
RUN useradd --create-home sametoken && install -d -o sametoken -g sametoken /home/sametoken/.cache
USER sametoken
WORKDIR /home/sametoken
VOLUME /home/sametoken/.cache
EXPOSE 8000
ENTRYPOINT ["sametoken"]
CMD ["--help"]
