/* gpu_transports.c - the tables of the transports for GPUs: over NCCL, and over torch's process group. */
#include "comm/gpu/gpu.h"

static const zs_flat_ops flats = {
    .flat_new = zs_turns_flat_new,
    .flat_free = zs_turns_flat_free,
    .gather_start = zs_gpu_gather_start,
    .gather_finish = zs_gpu_gather_finish,
    .numbers = zs_turns_numbers,
    .continue_from = zs_turns_continue_from,
};

static const zs_reader_ops readers = {
    .reader_new = zs_turns_reader_new,
    .reader_free = zs_turns_reader_free,
    .read_begin = zs_gpu_read_begin,
    .read_end = zs_gpu_read_end,
    .write_begin = zs_turns_write_begin,
    .write_end = zs_turns_write_end,
};

static const zs_talk_ops talk = {
    .exchange = zs_gpu_exchange,
    .broadcast = zs_gpu_broadcast,
    .broadcast_device = zs_gpu_broadcast_device,
    .gather_device = zs_gpu_gather_device,
    .publish = zs_gpu_publish,
    .published = zs_gpu_published,
    .locate = zs_gpu_locate,
    .end = zs_gpu_end,
    .abort = zs_gpu_abort,
};

static const zs_round_ops rounds = {
    .bucket_new = zs_local_bucket_new,
    .bucket_free = zs_local_bucket_free,
    .bucket_room = zs_local_bucket_room,
    .unit_bytes = sizeof(zs_gpu_unit),
    .unit_init = zs_gpu_unit_init,
    .unit_clear = zs_gpu_unit_clear,
    .renamed = zs_gpu_renamed,
    .usable = zs_gpu_usable_for_rounds,
    .send = zs_gpu_send,
    .arrive = zs_gpu_arrive,
    .share = zs_gpu_share,
    .release = zs_gpu_release,
    .drop = zs_gpu_drop,
    .reusable = zs_gpu_reusable,
    .rescale = zs_gpu_rescale,
    .give_up = zs_gpu_give_up,
    .room = zs_gpu_room,
    .reserve = zs_gpu_reserve,
};

const zs_comm_ops zs_nccl_ops = {
    .name = "nccl",
    .shard_align = 64,
    .stream = ZS_STREAM_REDUCE,
    .flats = &flats,
    .rounds = &rounds,
    .readers = &readers,
    .talk = &talk,
    .code_room = zs_gpu_code_room,
    .codes_apart = true,
    .bytes = zs_gpu_bytes,
    .close = zs_gpu_close,
    .destroy = zs_gpu_destroy,
};

const zs_comm_ops zs_c10d_gpu_ops = {
    .name = "c10d_gpu",
    .shard_align = 64,
    .stream = ZS_STREAM_REDUCE,
    .flats = &flats,
    .rounds = &rounds,
    .readers = &readers,
    .talk = &talk,
    .bytes = zs_gpu_bytes,
    .close = zs_gpu_close,
    .destroy = zs_gpu_destroy,
};
