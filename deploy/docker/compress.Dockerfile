# Compresses: driver and workers, on every node of a Ray cluster. Built in the root of the repository:
#   docker build -f deploy/docker/compress.Dockerfile -t lamina-compress:0.1.0 .
# Ray's version and Python's are the cluster's and its clients'. The base needs no CUDA: torch brings its own libraries,
# the node its driver. 1000:100 is the base's user `ray`.
ARG RAY_VERSION=2.60.0
FROM rayproject/ray:${RAY_VERSION}-py311-cpu

USER 0
RUN install --directory --owner=1000 --group=100 /opt/lamina
USER 1000
WORKDIR /opt/lamina
COPY --chown=1000:100 pyproject.toml README.md LICENSE ./
COPY --chown=1000:100 deploy/constraints.txt deploy/constraints.txt
# Alone and first: it is most of the image and changes least.
RUN python -m pip install --no-cache-dir -c deploy/constraints.txt torch
COPY --chown=1000:100 manifests manifests
COPY --chown=1000:100 pipeline pipeline
COPY --chown=1000:100 stores stores
COPY --chown=1000:100 workers workers
COPY --chown=1000:100 deploy/serving deploy/serving
RUN python -m pip install --no-cache-dir -c deploy/constraints.txt . ./deploy/serving
