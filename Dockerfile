# The demo on a machine without a GPU:
#   docker build --tag megatron-pg . && docker run --rm --volume "$PWD/runs:/megatron_pg/runs" megatron-pg
# PIP_ARGS: further arguments of pip, for instance where PyTorch's CPU build comes from (a smaller image).
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /megatron_pg
COPY . .
ARG PIP_ARGS=""
RUN make .venv/ready PIP_ARGS="$PIP_ARGS" && rm -rf /root/.cache
ENTRYPOINT ["make", "demo"]
