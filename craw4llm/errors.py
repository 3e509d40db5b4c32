"""The exceptions of the project. A message says what was given, what was expected and what to do.

`assert` is for our own mistakes; everything that a user, a file or a machine can cause is one of these.
"""


class Craw4LLMError(Exception):
    """Base class. The command line prints its message without a traceback and exits with `exit_code`."""

    exit_code = 1


class ConfigError(Craw4LLMError):
    """A config, parameter or experiment declaration that cannot be meant."""

    exit_code = 2


class InputError(Craw4LLMError):
    """An external input (corpus file, seed list, model, task data) is missing, unreadable or of the wrong form."""

    exit_code = 3


class ArtifactError(Craw4LLMError):
    """An artifact is missing, incomplete, damaged or does not fit the artifact it is used with."""

    exit_code = 4


class StageError(Craw4LLMError):
    """A stage could not do its work."""

    exit_code = 5


class StorageError(Craw4LLMError):
    """The artifact root cannot be written: full disk, no permission, read-only file system."""

    exit_code = 6


class Stopped(Craw4LLMError):
    """A stage was asked to end (SIGTERM, SIGINT), has saved where it is and will go on from there. 75: EX_TEMPFAIL of sysexits.h."""

    exit_code = 75
