"""How many tokens a request may have, prompt and answer together."""

from typing import Any

from fmoe_ray.config import Settings
from fmoe_ray.errors import ConfigError


def context_limit(settings: Settings, config: Any) -> int:
    """`config` is transformers'. Raises ConfigError for more than the model was made for, or where
    neither settings nor model name a limit.
    """
    asked = settings.engine.max_context
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is None and limit is None:
        raise ConfigError(
            f"{settings.model.path}: its config.json names no context limit; set engine.max_context"
        )
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            f"engine.max_context {asked}: the model was made for {limit} tokens; give at most that"
        )
    if asked is not None:
        return asked
    assert limit is not None
    return int(limit)
