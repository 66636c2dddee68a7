#!/bin/sh
# Start vLLM with kvtier: serve.sh MODEL [ARGUMENTS OF vllm serve]
# KVTIER_CONFIG names the configuration. The shutdown of vLLM gets 10 s more than close_timeout.
set -eu
config=${KVTIER_CONFIG:-/etc/kvtier/kvtier.yaml}
args=$(kvtier vllm-args "$config" --model "$1")
# vLLM must be this process, or it does not get SIGTERM.
eval "exec vllm serve \"\$@\" --shutdown-timeout 40 $args"
