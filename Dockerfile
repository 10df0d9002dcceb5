# Serves a checkpoint mounted at /model:
#   docker build -t tessera . && docker run --rm -p 127.0.0.1:50051:50051 -v /path/to/checkpoint:/model:ro --shm-size 1g tessera
#
# The default torch brings its CUDA libraries along (several GB). PIP_ARGS can point pip at another index with a CPU-only build.
FROM python:3.11-slim

# A compiler, because kernels of this package and of DeepSpeed are built on first use for the CPU they run on.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ARG PIP_ARGS=""
WORKDIR /opt/tessera
# Dependencies first: this layer is kept until they change. They are read from pyproject.toml, so that nothing of the package is built before
# its sources are here: setuptools keeps what an earlier build left where that is newer than the source.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *(line for extra in ('serve', 'train') for line in project['optional-dependencies'][extra] if not line.startswith('tessera')), sep='\n')" > requirements.txt \
    && pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt -r requirements.txt
COPY LICENSE README.md ./
COPY serve serve
COPY finetune finetune
COPY checkpoint checkpoint
COPY configuration configuration
COPY host host
COPY tessera tessera
COPY protos protos
RUN pip install --no-cache-dir ${PIP_ARGS} --no-deps . && rm -rf build *.egg-info

RUN useradd --uid 10001 --create-home tessera
USER tessera
WORKDIR /home/tessera
EXPOSE 50051 9400
ENTRYPOINT ["tessera-serve"]
CMD ["--model", "/model", "--host", "0.0.0.0", "--insecure-public"]
