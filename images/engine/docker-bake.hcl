# Builds and names the images that are published: `docker buildx bake [cuda|rocm|cpu]`, `--print` to see the plan.

variable "VERSION" {
  default = "0.1.0"
}

variable "VLLM_VERSION" {
  default = "0.32.0"
}

variable "REPOSITORY" {
  default = "ghcr.io/gen-stack/vllm"
}

group "default" {
  targets = ["engine"]
}

# A variant is one line: its name, the upstream image, what follows the version in our tag, and upstream's platforms.
target "engine" {
  matrix = {
    variant = [
      { name = "cuda", image = "vllm/vllm-openai", suffix = "", platforms = ["linux/amd64", "linux/arm64"] },
      { name = "rocm", image = "vllm/vllm-openai-rocm", suffix = "-rocm", platforms = ["linux/amd64"] },
      { name = "cpu", image = "vllm/vllm-openai-cpu", suffix = "-cpu", platforms = ["linux/amd64", "linux/arm64"] },
    ]
  }
  name      = variant.name
  context   = "."
  platforms = variant.platforms
  args = {
    ENGINE_IMAGE = "${variant.image}:v${VLLM_VERSION}"
  }
  labels = {
    "org.opencontainers.image.version" = "${VLLM_VERSION}-${VERSION}"
  }
  tags = ["${REPOSITORY}:${VLLM_VERSION}-${VERSION}${variant.suffix}"]
}
