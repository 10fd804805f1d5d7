"""What integrations and extras take from the core: they import nothing else of it. A name is
described where it is defined; tests/project/test_ratchets.py counts them.
"""

# ruff: isort: skip_file
# fmt: off
from zshard._core import (
    Comm, DivergenceError, Engine, File, OptimPlan, PeerError, PeerTimeoutError, Unit, average,
    expect_norms, finite, has_held_units, keeps_memory, kept_bytes, kept_count, kept_files,
    kept_finish, kept_format, kept_look_again, kept_mark, kept_place, kept_runs, kept_write,
    machine, make_folder, remove_folder, shared_rows, shares_state, slice_part, squares,
    squares_value, trace_start, trace_stop,
)
from zshard._errors import CheckpointError, KeeperError, NonFiniteError, did_you_mean, warn
from zshard._removed import removal
from zshard._version import __version__
from zshard.checkpoint.checkpoint import (
    Checkpoint, OptimizerState, Readable, is_extra_state, read_whole,
)
from zshard.checkpoint.contents import Contents, Item, Replicas, ranks_of, tensors_of
from zshard.checkpoint.folder import (
    PART, Staging, Target, absolute, finished, latest_checkpoint, names_at, path_of,
)
from zshard.checkpoint.load import Loaded, Reader, load
from zshard.checkpoint.manifest import (
    BLOCK, LIMIT, NAME, Block, FileRecord, Manifest, check_blocks, data_blocks, dump, head_blocks,
)
from zshard.checkpoint.manifest import parse as parse_manifest
from zshard.checkpoint.manifest import share as share_blocks
from zshard.checkpoint.opening import MODEL, files_of, open_own, open_tensors, opened, read_manifest
from zshard.checkpoint.safetensors import (
    CODES, DTYPES, HEADER_LIMIT, OpenFile, SafetensorsFile, are_counts, object_of,
)
from zshard.checkpoint.save import clean_up, int_of, save
from zshard.checkpoint.save_plan import (
    Beside, Piece, PlannedFile, SavePlan, index_of, joined, lay_out, record_of, texts_of,
)
from zshard.checkpoint.script_state import rng_state, set_rng_state
from zshard.checkpoint.write import Writer, chunk_for, copy_file, names_of_all, write_text
from zshard.fsdp import ARGUMENTS, FSDP, Wrapped
from zshard.grad_scaler import GradScaler
from zshard.guard.slices import ShardParameter, WholeParameter, grads_of, plain, to_local
from zshard.guard.whole_values import full_numel, full_tensor
from zshard.memory.dry_run import World
from zshard.memory.host_limits import ROOT, groups, read_text
from zshard.memory.report import dry_run_of, full_named_parameters, num_parameters, size_of_state
from zshard.model.copy import copy_plain
from zshard.model.methods import (
    GradientReductionHandle, UnshardHandle, call_as_forward, register_forward_method,
)
from zshard.model.shard_model import broadcast_buffers
from zshard.model.summon import full_params
from zshard.offload import Offload, OffloadPolicy, offload_of, offload_on
from zshard.optim import SGD, Adam, AdamW
from zshard.optim.clip import clip_grad_norm, larger, norm_over_ranks, power_sum
from zshard.optim.hooks import know
from zshard.optim.in_backward import is_stepped_in_backward
from zshard.optim.sharded_state import (
    Hidden, SizeOf, copied, hidden, move_together, one_tensor, other_state, params_of,
    without_parameters, zeros_side_by_side,
)
from zshard.optim.step import InOneCall, Prepared, check_state, keep_options, state_problem
from zshard.options import (
    DeviceLike, OffloadLike, OffloadPolicyLike, PrecisionLike, ProcessGroupLike, StrategyLike,
    checks_names, either, parse_options, parse_size,
)
from zshard.precision import MixedPrecision, MixedPrecisionPolicy, name_of
from zshard.ranks.agreement import (
    Fact, PublicCall, bytes_of, check_agreement, checksum, gather, gather_bytes, gather_objects,
    on_all_ranks, on_any_rank, take_from, tensor_fact, value_fact, warn_on_rank_0,
)
from zshard.ranks.ends import may_stay_open
from zshard.ranks.groups import (
    Group, block_of, column_of, make_default_group, resolve_groups, start_alone,
)
from zshard.ranks.meeting import host_id
from zshard.ranks.nccl import library as nccl_library
from zshard.ranks.transports import comm_for, group_beside
from zshard.ranks.wire import Wire, check_wire, spelled
from zshard.state import state_dict_form
from zshard.state.load_state_dict import comm_of
from zshard.state.optimizer import gather_state
from zshard.state.source import Copy, Source, chunks, shard_of
from zshard.state.stand_ins import Pending
from zshard.strategy import ShardingStrategy
from zshard.units.extensions import EXTENSIONS, Extension, ParamRef
from zshard.units.moment import PASS, REPLACED, UNSHARDED, refuse, replaced, settle, writers
from zshard.units.shards import Part, ids_of, known_parts, part_of, units_stepped_by
from zshard.units.units import (
    Options, State, bare, class_of, is_apart, is_unit, known_hooks, plain_name, session, state_of,
    units_of, unsharded, writing,
)
from zshard.wrap.meta import reset_or_leave
from zshard.wrap.tree import UnitSpec, has_forward
