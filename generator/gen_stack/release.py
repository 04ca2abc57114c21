"""The release: which engine this version is tested with, and what its images are called. One place for all of it."""

from gen_stack import __version__

ENGINE_VERSION = "0.32.0"
"""The vLLM release that this version of gen-stack is tested with."""

GATEWAY_IMAGE = "haproxy:3.0"
"""HAProxy's official image: the branch with long-term support that this version of gen-stack is tested with."""

UPSTREAM_IMAGES = {
    "cuda": "vllm/vllm-openai",
    "rocm": "vllm/vllm-openai-rocm",
    "cpu": "vllm/vllm-openai-cpu",
}
"""Upstream's public images by device; each has a tag `v<vllm version>`."""

RELEASE_REPOSITORY = "ghcr.io/gen-stack/vllm"
"""Where the released images are, as `<repository>:<vllm version>-<our version>`, with `-rocm` or `-cpu` behind it."""

LOCAL_REPOSITORY = "gen-stack/vllm"
"""The name of an image that is built where it runs (`engine.image: build`)."""


def upstream_image(device: str, engine_version: str) -> str:
    """Name upstream's image of `engine_version` (such as `0.32.0`) for `device`."""
    return f"{UPSTREAM_IMAGES[device]}:v{engine_version}"


def is_upstream_image(reference: str) -> bool:
    """Tell whether an image reference is one of upstream's, whatever its tag or digest."""
    name = reference.partition("@")[0].removeprefix("docker.io/")
    return name.partition(":")[0] in UPSTREAM_IMAGES.values()


def is_upstream_engine(image: str) -> bool:
    """Tell whether the engine of an image (`build` or a reference) is upstream's with nothing added, as far as known.

    It is in upstream's images, and in ours; an image of somebody's own may have plugins, which bring flags.
    """
    ours = image.partition("@")[0].partition(":")[0] in (RELEASE_REPOSITORY, LOCAL_REPOSITORY)
    return image == "build" or is_upstream_image(image) or ours


def image_tag(device: str, engine_version: str) -> str:
    """Name the tag of our image for `device`, without a repository, such as `0.32.0-0.1.0-rocm`."""
    suffix = "" if device == "cuda" else f"-{device}"
    return f"{engine_version}-{__version__}{suffix}"
