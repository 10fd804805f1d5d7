"""The core's interface for integrations and extras, which import nothing else of it. A name is
described where it is defined; tests/project/test_ratchets.py counts them.
"""

# ruff: isort: skip_file
# fmt: off
from zshard._core import (
    Comm, DivergenceError, File, KeptStep, PeerError, PeerTimeoutError, Unit, average, build,
    expect_norms, finite, has_held_units, keeps_memory, kept_place, log_forget, log_level, machine,
    shared_rows, shares_state, trace_start, trace_stop,
)
from zshard._errors import CheckpointError, did_you_mean, warn
from zshard._built import note_on
from zshard._logger import drain, log
from zshard._removed import removal
from zshard._version import __version__
from zshard.checkpoint.checkpoint import Checkpoint, OptimizerState, Readable
from zshard.checkpoint.contents import Contents, inventory, ranks_of
from zshard.checkpoint.folder import PART, Staging, Target, latest_checkpoint, names_at, path_of
from zshard.checkpoint.load import load
from zshard.checkpoint.manifest import BLOCK, NAME, FileBlocks, FileRecord, Manifest
from zshard.checkpoint.progress import advance, bar
from zshard.checkpoint.safetensors import CODES, DTYPES, OpenFile, SafetensorsFile
from zshard.checkpoint.save import save
from zshard.checkpoint.save_plan import Beside, SavePlan, index_of, lay_out, texts_of, with_dtype
from zshard.checkpoint.script_state import rng_state, set_rng_state
from zshard.checkpoint.write import Writer, write_text
from zshard.fsdp import ARGUMENTS, FSDP, Wrapped
from zshard.grad_scaler import GradScaler
from zshard.guard.slices import ShardParameter, WholeParameter, grads_of, plain, to_local
from zshard.guard.whole_values import full_numel, full_tensor, read_full
from zshard.memory.host_limits import ControlGroup
from zshard.memory.report import dry_run_of, full_named_parameters, num_parameters
from zshard.model.copy import copy_plain
from zshard.model.methods import call_as_forward, register_forward_method
from zshard.model.shard_model import broadcast_buffers
from zshard.model.summon import full_params
from zshard.offload import Offload
from zshard.optim import SGD, Adam, AdamW
from zshard.optim.hooks import know
from zshard.optim.in_backward import is_stepped_in_backward
from zshard.optim.sharded_state import (
    SizeOf, bytes_declared, copied, move_together, one_tensor, other_state, params_of,
    without_parameters, zeros_side_by_side,
)
from zshard.optim.step import InOneCall, keep_options
from zshard.options import checks_names, parse_size
from zshard.precision import MixedPrecision
from zshard.ranks.agreement import (
    Fact, PublicCall, bytes_of, check_agreement, checksum, gather, gather_bytes, gather_objects,
    on_all_ranks, take_from, tensor_facts, warn_on_rank_0,
)
from zshard.ranks.ends import may_stay_open
from zshard.ranks.groups import make_default_group, resolve_groups
from zshard.ranks.meeting import host_id
from zshard.ranks.nccl import library as nccl_library
from zshard.ranks.transports import group_beside
from zshard.ranks.wire import Wire
from zshard.state import state_dict_form
from zshard.state.load_state_dict import comm_of
from zshard.state.optimizer import gather_state
from zshard.state.optimizer_load import run_post_hooks
from zshard.state.optimizer_load import load as load_state_of_optimizer
from zshard.state.source import Copy, LoadPlan, chunks, shard_of
from zshard.strategy import ShardingStrategy
from zshard.units.extensions import EXTENSIONS, Extension
from zshard.units.moment import PASS, REPLACED, UNSHARDED, refuse, reshard_all
from zshard.units.shards import Entry, Part, ids_of, part_of, units_stepped_by
from zshard.units.units import (
    State, bare, class_of, is_unit, plain_name, session, state_of, units_of, writing,
)
from zshard.wrap.meta import reset_or_leave
