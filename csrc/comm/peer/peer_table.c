/* peer_table.c - the table of the transport over mappings of the peers' memory. */
#include "comm/peer/peer.h"

static const zs_round_ops rounds = {
    .bucket_new = zs_gpu_bucket_new,
    .bucket_free = zs_local_bucket_free,
    .bucket_room = zs_local_bucket_room,
    .cunit_new = zs_peer_cunit_new,
    .cunit_free = zs_peer_cunit_free,
    .cunit_renamed = zs_peer_cunit_renamed,
    .post = zs_peer_post,
    .collect = zs_peer_collect,
    .share = zs_peer_share,
    .collect_shared = zs_peer_collect_shared,
    .release = zs_peer_release,
    .reusable = zs_peer_reusable,
    .give_up = zs_gpu_give_up,
    .room = zs_peer_room,
    .reserve = zs_gpu_reserve,
};

const zs_comm_ops zs_peer_ops = {
    .name = "peer",
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
