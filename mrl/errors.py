"""Errors for users. Each message says what is wrong, with values and place, why, and what to do.

All can be pickled with their arguments, so that they cross process boundaries unchanged.
"""


class MrlError(Exception):
    """Base of every error that the project raises on purpose."""


class ConfigError(MrlError, ValueError):
    """Configuration value or combination that cannot work; found before engines start."""


class DataError(MrlError, ValueError):
    """Unusable data row or file; names file and line."""


class RewardError(MrlError, RuntimeError):
    """Violation of a verifier's contract (wrong count, NaN, failed start)."""


class NumericError(MrlError, RuntimeError):
    """NaN or infinity in place of a number; names the value and the samples. Nothing was trained on it."""


class RolloutError(MrlError, RuntimeError):
    """Failure of the generation engine, or a call that its state does not allow."""


class PeerLost(RolloutError):
    """Failure of an engine rank because another one of the same engine was late or gone."""


class RoutingError(MrlError, RuntimeError):
    """Routes to replay that are missing, or not used exactly once each; names the sample or router."""


class RolloutBufferError(MrlError, RuntimeError):
    """Misuse of the rollout buffer, or a group that it could not store; names the group."""


class WeightSyncError(MrlError, RuntimeError):
    """Failed weight sync; the receiving engine serves nothing until a full resend commits."""


class CheckpointError(MrlError, RuntimeError):
    """Checkpoint that cannot be written or loaded; names file and reason."""


class DamagedCheckpoint(CheckpointError):
    """Checkpoint whose files differ from its manifest; the previous one may load."""


class WorkerLost(MrlError, RuntimeError):
    """Worker process that died or stopped responding; names its rank and the phase."""
