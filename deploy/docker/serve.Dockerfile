# Serves: vLLM with the package `lamina`, so that no code of a checkpoint runs. Built in the root of the repository:
#   docker build -f deploy/docker/serve.Dockerfile -t lamina-serve:0.1.0 .
# vLLM pins its own torch and transformers, which are not those that compress: two images, not one.
ARG VLLM_VERSION=0.33.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

WORKDIR /opt/lamina
COPY deploy/serving deploy/serving
# No dependencies: the engine's stay as they are, and the import fails here if they are too old.
RUN python3 -m pip install --no-cache-dir --no-deps ./deploy/serving \
    && python3 -c "import lamina"
ENTRYPOINT ["vllm", "serve"]
