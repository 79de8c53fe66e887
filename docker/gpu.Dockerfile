# docker build -f docker/gpu.Dockerfile -t skyrl-tinker:gpu .
# Needs the NVIDIA container toolkit on the host; CUDA itself comes with the torch wheels.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 tinker \
    && install --directory --owner tinker /app /data

USER tinker
WORKDIR /app
COPY --chown=tinker . .
RUN PIP_NO_CACHE_DIR=1 scripts/setup gpu

ENV PATH=/app/.venv/bin:$PATH SKYRL_TINKER_HOME=/data SKYRL_TINKER_DEVICE=cuda
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz')"]
STOPSIGNAL SIGTERM
# Any process that reaches the port can use the server: publish it on loopback or a trusted network only, or make a key
# (`skyrl-tinker keys create --home /data --name NAME`) and leave out --insecure.
CMD ["skyrl-tinker", "serve", "--host", "0.0.0.0", "--insecure"]
