"""Which failed starts mean that the configuration must change, and which another try may be spared."""

from __future__ import annotations

from kvd.config import ConfigError
from kvd.executor.models.spec import ModelError
from kvd.storage.errors import (
    DiskFaultError,
    EncryptionKeyError,
    RecipesUnreadableError,
    StateDirError,
    StateLockedError,
    UnknownFormatError,
)
from kvd.text.errors import TextError
from kvd.transport.errors import EndpointError, EndpointInUseError

TEMPORARY = (StateLockedError, EndpointInUseError, DiskFaultError)
"""Another start may be spared these with the same configuration."""

_CONFIGURATION = (StateDirError, UnknownFormatError, RecipesUnreadableError, EncryptionKeyError, EndpointError, ModelError, TextError)


def as_config_error(error: BaseException | None) -> ConfigError | None:
    """What is to be changed, if that is what the error of a start means; its message is the error's."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, TEMPORARY) or not isinstance(error, _CONFIGURATION):
        return None
    wrong = ConfigError(str(error))
    wrong.__cause__ = error
    return wrong
