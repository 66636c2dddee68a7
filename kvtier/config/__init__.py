"""Configuration: YAML files, parsed once into strict, frozen models.

Only this package reads dicts of options and environment variables.
"""

from __future__ import annotations

from kvtier.config._engine import (
    VllmEntryPoint,
    has_rank_paths,
    resolve_rank_paths,
    vllm_transfer_config,
    with_staged_loads,
)
from kvtier.config._environment import (
    child_environment,
    set_default_variables,
    variable,
    variables,
)
from kvtier.config._fields import RANK_PLACEHOLDER, Duration, FilePath, Fraction, Size
from kvtier.config._kinds import (
    TIERS,
    options_of,
    schema,
)
from kvtier.config._load import load_config, parse_config, parse_tier
from kvtier.config._models import (
    EngineConfig,
    IdentityConfig,
    KvtierConfig,
    PlacementConfig,
    TraceConfig,
    TransferConfig,
    check_chunk_fits,
)
from kvtier.config._shared import (
    MooncakeTierConfig,
    ObjectTierConfig,
    SharedDirTierConfig,
    SharedTierConfig,
)
from kvtier.config._tiers import (
    LocalDirectory,
    NvmeTierConfig,
    RamTierConfig,
    Remark,
    TierConfig,
    slot_nbytes,
)
from kvtier.config._yaml import Origin

__all__ = [
    "RANK_PLACEHOLDER",
    "TIERS",
    "Duration",
    "EngineConfig",
    "FilePath",
    "Fraction",
    "IdentityConfig",
    "KvtierConfig",
    "LocalDirectory",
    "MooncakeTierConfig",
    "NvmeTierConfig",
    "ObjectTierConfig",
    "Origin",
    "PlacementConfig",
    "RamTierConfig",
    "Remark",
    "SharedDirTierConfig",
    "SharedTierConfig",
    "Size",
    "TierConfig",
    "TraceConfig",
    "TransferConfig",
    "VllmEntryPoint",
    "check_chunk_fits",
    "child_environment",
    "has_rank_paths",
    "load_config",
    "options_of",
    "parse_config",
    "parse_tier",
    "resolve_rank_paths",
    "schema",
    "set_default_variables",
    "slot_nbytes",
    "variable",
    "variables",
    "vllm_transfer_config",
    "with_staged_loads",
]
