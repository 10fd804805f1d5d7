/* gpu_table.c - the tables that all transports for GPUs share. */
#include "comm/gpu/gpu.h"

const zs_flat_ops zs_gpu_flat_ops = {
    .flat_new = zs_gpu_flat_new,
    .flat_free = zs_local_flat_free,
    .slot_new = zs_gpu_slot_new,
    .gather_start = zs_gpu_gather_start,
    .gather_finish = zs_gpu_gather_finish,
};

const zs_reader_ops zs_gpu_reader_ops = {
    .reader_new = zs_local_reader_new,
    .reader_free = zs_local_reader_free,
    .read_begin = zs_gpu_read_begin,
    .read_end = zs_gpu_read_end,
};

const zs_talk_ops zs_gpu_talk_ops = {
    .exchange = zs_gpu_exchange,
    .broadcast = zs_gpu_broadcast,
    .broadcast_device = zs_gpu_broadcast_device,
    .gather_device = zs_gpu_gather_device,
    .tell = zs_gpu_tell,
    .said = zs_gpu_said,
    .end = zs_gpu_end,
    .abort = zs_gpu_abort,
};
