/* gpu_transports.c - the transports whose backends move gradients: over NCCL, and over torch's process group. */
#include "comm/gpu/gpu.h"

static const zs_round_ops rounds = {
    .bucket_new = zs_gpu_bucket_new,
    .bucket_free = zs_local_bucket_free,
    .bucket_room = zs_local_bucket_room,
    .cunit_new = zs_gpu_cunit_new,
    .cunit_free = zs_gpu_cunit_free,
    .cunit_renamed = zs_gpu_cunit_renamed,
    .post = zs_gpu_post,
    .collect = zs_gpu_collect,
    .share = zs_gpu_share,
    .collect_shared = zs_gpu_collect_shared,
    .release = zs_gpu_release,
    .reusable = zs_gpu_reusable,
    .give_up = zs_gpu_give_up,
    .room = zs_gpu_room,
    .reserve = zs_gpu_reserve,
};

const zs_comm_ops zs_nccl_ops = {
    .name = "nccl",
    .shard_align = 64,
    .stream = ZS_STREAM_REDUCE,
    .flats = &zs_gpu_flat_ops,
    .rounds = &rounds,
    .readers = &zs_gpu_reader_ops,
    .talk = &zs_gpu_talk_ops,
    .bytes = zs_gpu_bytes,
    .close = zs_gpu_close,
    .destroy = zs_gpu_destroy,
};

const zs_comm_ops zs_c10d_gpu_ops = {
    .name = "c10d_gpu",
    .shard_align = 64,
    .stream = ZS_STREAM_REDUCE,
    .flats = &zs_gpu_flat_ops,
    .rounds = &rounds,
    .readers = &zs_gpu_reader_ops,
    .talk = &zs_gpu_talk_ops,
    .bytes = zs_gpu_bytes,
    .close = zs_gpu_close,
    .destroy = zs_gpu_destroy,
};
