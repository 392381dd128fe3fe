# docker build -t reverie .
# docker run --rm --gpus all -v ~/logdir:/logdir reverie \
#     train --configs crafter --logdir '/logdir/{timestamp}'
#
# Without a GPU leave out --gpus all; --build-arg TORCH_INDEX=URL takes torch from another
# index, such as the one with builds for the CPU alone (a tenth of the size).
FROM python:3.12-slim

# Environments draw without a screen, on the processor where there is no graphics card.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        libegl1 libgl1 libgl1-mesa-dri libglib2.0-0 libosmesa6 \
    && rm -rf /var/lib/apt/lists/*
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

WORKDIR /app
ARG TORCH_INDEX=
ARG EXTRAS=atari,crafter,tensorboard,video

# torch is the large layer and changes least: the range is that of pyproject.toml.
COPY pyproject.toml ./
RUN python -c "import tomllib; print(next(need for need in tomllib.load(open( \
        'pyproject.toml', 'rb'))['project']['dependencies'] \
        if need.startswith('torch')))" > torch.txt \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r torch.txt

COPY LICENSE README.md ./
COPY reverie ./reverie
RUN pip install ".[$EXTRAS]"

VOLUME /logdir
ENTRYPOINT ["reverie"]
CMD ["train", "--logdir", "/logdir/{timestamp}"]
