/* cuda_image.c - see cuda_image.h. setup.py gives the image's path (ZS_CUDA_FATBIN) where it has made one. */
#include "device/cuda_image.h"

#ifdef ZS_CUDA_FATBIN

__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        "zs_cuda_image_begin:\n"
        ".incbin \"" ZS_CUDA_FATBIN "\"\n"
        "zs_cuda_image_end:\n"
        ".byte 0\n"
        ".popsection\n");
extern const char zs_cuda_image_begin[] __attribute__((visibility("hidden")));
extern const char zs_cuda_image_end[] __attribute__((visibility("hidden")));

const void *zs_cuda_image(void)
{
    return zs_cuda_image_begin;
}

size_t zs_cuda_image_bytes(void)
{
    return (size_t)(zs_cuda_image_end - zs_cuda_image_begin);
}

const char *zs_cuda_image_targets(void)
{
    return ZS_CUDA_TARGETS;
}

int zs_cuda_image_version(void)
{
    return ZS_CUDA_VERSION;
}

#else

const void *zs_cuda_image(void)
{
    return NULL;
}

size_t zs_cuda_image_bytes(void)
{
    return 0;
}

const char *zs_cuda_image_targets(void)
{
    return "";
}

int zs_cuda_image_version(void)
{
    return 0;
}

#endif
