"""The errors users meet. Each message says what happened, with which values, where, and what to do.

All are picklable with their arguments, so that they cross process boundaries unchanged.
"""


class MrlError(Exception):
    """Base of every error the project raises on purpose."""


class ConfigError(MrlError, ValueError):
    """A configuration value or combination that cannot work; found before engines start."""


class DataError(MrlError, ValueError):
    """A data row or file that cannot be used; names file and line."""


class RewardError(MrlError, RuntimeError):
    """A verifier broke its contract (wrong count, NaN, failed start)."""


class NumericError(MrlError, RuntimeError):
    """A NaN or an infinity where a number must be; names the value and the samples. Nothing was trained on it."""


class RolloutError(MrlError, RuntimeError):
    """The generation engine failed or was used in a state that does not allow the call."""


class PeerLost(RolloutError):
    """A rank of an engine could not go on because another one of the same engine was late or gone."""


class RoutingError(MrlError, RuntimeError):
    """Choices of experts that a pass was to take are not there, or were not taken once each; names the sample or router."""


class PoolError(MrlError, RuntimeError):
    """The pool of samples was used against its rules, or could not keep a group; names the group."""


class WeightSyncError(MrlError, RuntimeError):
    """A weight sync failed; the receiving engine serves nothing until a full resend commits."""


class CheckpointError(MrlError, RuntimeError):
    """A checkpoint could not be written or is not acceptable for loading; names file and reason."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's files are not those that its manifest lists; the one before it may do."""


class WorkerLost(MrlError, RuntimeError):
    """A worker process died or stopped answering; names its rank and the phase."""
