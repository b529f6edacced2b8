"""What a config's quantization_config stores: which layers, in which format, with which scales."""
