"""Every error that Headrace raises on purpose, and the exit code of a process that ends with it.

    HeadraceError
    ├── ConfigError             a setting is unknown, malformed or clashes with another
    ├── KeysError               a key file is missing, damaged, or a secret that others may read
    ├── EnvError                an environment could not be built or broke its contract
    │   ├── UnknownEnvError         no such environment id, import path or callable
    │   ├── EnvContractError        reward, info or observation is not what the env's spaces promise
    │   ├── EnvRaisedError          an env in a process of its own raised
    │   ├── EnvHangError            an env in a process of its own did not answer in time; the process was killed
    │   ├── EnvCrashError           a process of envs ended by itself, or took too much memory
    │   ├── EnvNeighbourError       another env of the same process took it down
    │   ├── EnvHostLostError        the host of remote envs fell silent, left, or was refused
    │   ├── EnvRestartBudgetError   an env kept failing until its rebuild budget was spent
    │   └── ClientLostError         the client that drove an external episode is gone
    ├── EpisodeError            a call about an external episode cannot be done; kinds are in episodes.py
    ├── EpisodeTimeoutError     a call about an external episode was not answered within its deadline
    ├── ModuleError             a policy module could not be built, or returned the wrong arrays
    │   ├── WeightsMismatchError    weights have other names or shapes than the workers' module
    │   └── RefusedWeightsError     a worker could not load a version of the weights
    ├── PolicyCallError         a trained policy was given an observation or an agent that is not its own
    ├── CallbackError           a user's callback raised
    ├── ChunkError              chunks that are not parts of one episode, or a cut that leaves no step
    ├── StateError              a runner's state that does not fit the runner it is given to
    ├── ConnectorError          a connector raised, or returned the wrong arrays
    ├── DecodeError             a message that is not a valid Headrace message
    ├── EncodeError             something that must not or cannot go on the wire
    │   └── InfosTooLargeError      the infos of one batch
    ├── RefusedError            the broker refused this peer
    │   ├── FencedError             a newer incarnation or a newer learner has taken this one's place
    │   ├── KeysRefusedError        the broker did not let this peer in: their keys do not match
    ├── UnreachableError        a server did not answer within its deadline
    │   └── RedisUnavailableError   Redis did not answer, or refuses writes
    │       └── RedisContractError      it has the fleet's keys by another version of the contract
    ├── PortInUseError          an endpoint is taken
    ├── RunDirError             the run directory cannot be used
    ├── CheckpointError         a learner's checkpoint is torn or corrupt
    └── WindowStalledError      the learner holds every batch uncommitted and waits for more

Each error carries its facts as attributes and builds its sentence from them: what happened, to what, the numbers, what
to do. `exit_code` is the exit code of a Headrace process that ends with the error. Each family has a file of its own;
import from here.
"""

from headrace.schemas.errors.envs import (
    EnvContractError as EnvContractError,
    EnvCrashError as EnvCrashError,
    EnvError as EnvError,
    EnvHangError as EnvHangError,
    EnvHostLostError as EnvHostLostError,
    EnvNeighbourError as EnvNeighbourError,
    EnvRaisedError as EnvRaisedError,
    EnvRestartBudgetError as EnvRestartBudgetError,
    UnknownEnvError as UnknownEnvError,
    missing_env_error as missing_env_error,
)
from headrace.schemas.errors.fleet import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    KeysError as KeysError,
    PortInUseError as PortInUseError,
    RedisContractError as RedisContractError,
    RedisUnavailableError as RedisUnavailableError,
    RunDirError as RunDirError,
    UnreachableError as UnreachableError,
    WindowStalledError as WindowStalledError,
    absolute as absolute,
    is_there as is_there,
    machine_error as machine_error,
    reading as reading,
    disk_full_error as disk_full_error,
    no_fleet_error as no_fleet_error,
    removed_error as removed_error,
    socket_folder_error as socket_folder_error,
    write_error as write_error,
    writing as writing,
)
from headrace.schemas.errors.root import ExitCode as ExitCode, HeadraceError as HeadraceError, words_of as words_of
from headrace.schemas.errors.runners import (
    WRAPPERS as WRAPPERS,
    CallbackError as CallbackError,
    ChunkError as ChunkError,
    ConnectorError as ConnectorError,
    ModuleError as ModuleError,
    NotFiniteError as NotFiniteError,
    PolicyCallError as PolicyCallError,
    RefusedWeightsError as RefusedWeightsError,
    StateError as StateError,
    WeightsMismatchError as WeightsMismatchError,
    export_error as export_error,
    which_module_error as which_module_error,
)
from headrace.schemas.errors.wire import (
    DecodeError as DecodeError,
    EncodeError as EncodeError,
    FencedError as FencedError,
    InfosTooLargeError as InfosTooLargeError,
    KeysRefusedError as KeysRefusedError,
    RefusedError as RefusedError,
    refusal as refusal,
)
