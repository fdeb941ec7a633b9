# docker build -t smpc . && docker run --rm --gpus all --ipc host -v "$PWD:/work" smpc run train.py
#
# torch is PyPI's, with CUDA; the driver is the host's. Versions are those of constraints.txt.
FROM python:3.12-slim
# Triton compiles its launchers with a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /opt/smpc
RUN pip install --no-cache-dir --constraint /opt/smpc/constraints.txt '/opt/smpc[hf,kernels]'
WORKDIR /work
ENTRYPOINT ["smpc"]
