/* libcuda.so.1 for Triton's launcher on a machine without a GPU: it keeps what it is asked to
   launch, and refuses what a device would refuse. It runs nothing.

   Limits: CUDA programming guide, technical specifications by compute capability; the rules of
   attributes: CUDA driver API, cuLaunchKernelEx. Built by gpu_driver.py with cuda.h of Triton. */

#include <stdlib.h>
#include <string.h>

#define __CUDA_API_VERSION_INTERNAL
#include "cuda.h"

#define MOST 65536
#define SHARED_WITHOUT_ASKING 49152

struct function {
  char name[96];
  int shared; /* dynamic bytes that it may have */
};

struct launch {
  const char *name;
  unsigned grid[3];
  unsigned threads, shared;
  int refused;
};

static int capability, shared_most;
static struct launch launches[MOST];
static int launched;
static char context;

void gpu_driver_begin(int major_and_minor, int shared) {
  capability = major_and_minor;
  shared_most = shared;
  launched = 0;
}

int gpu_driver_count(void) { return launched; }

const struct launch *gpu_driver_launch(int number) { return &launches[number]; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "not supported";
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *found) {
  *found = (CUcontext)&context;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext given) { return CUDA_SUCCESS; }

CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
  return cuCtxGetCurrent(found);
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  switch (which) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = shared_most;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = shared_most + 1024;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    *value = 65536;
    break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
    *value = 32;
    break;
  default:
    *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return memcmp(image, "\177ELF", 4) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
  struct function *made = calloc(1, sizeof *made);
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  strncpy(made->name, name, sizeof made->name - 1);
  made->shared = SHARED_WITHOUT_ASKING;
  *found = (CUfunction)made;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value > shared_most) return CUDA_ERROR_INVALID_VALUE;
    ((struct function *)function)->shared = value;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function,
                                      const CUlaunchConfig *config) {
  *clusters = 1;
  return CUDA_SUCCESS;
}

/* Tensors have no memory here, but for lists that the host made: what their addresses would be on
   a device is not asked. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  const struct function *kernel = (const struct function *)function;
  struct launch *kept = &launches[launched % MOST];
  unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  *kept = (struct launch){kernel->name,
                          {config->gridDimX, config->gridDimY, config->gridDimZ},
                          threads,
                          config->sharedMemBytes};
  /* Triton's launcher has one attribute that may say no. */
  for (unsigned each = 0; each < config->numAttrs; each++)
    kept->refused |=
        config->attrs[each].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ||
        config->attrs[each].value.programmaticStreamSerializationAllowed;
  for (int axis = 0; axis < 3; axis++)
    kept->refused |= !kept->grid[axis] || kept->grid[axis] > (axis ? 65535u : 2147483647u);
  kept->refused |= !threads || threads > 1024;
  kept->refused |= config->sharedMemBytes > (unsigned)kernel->shared;
  launched++;
  return kept->refused ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
