/* libcuda.so.1 and libnvidia-ml.so.1 in one: the few calls that `base.gpus` makes, answered from the
   file that FAKE_GPUS names. First line: the answer of cuInit and the driver's CUDA version. Then a
   line per device in CUDA's order: UUID in hex, bytes, bytes that NVML says are free (-1: it does
   not know the device's memory), kind of the UUID in NVML, major, minor, multiprocessors,
   integrated, name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct device {
    unsigned char uuid[16];
    unsigned long long bytes;
    long long free;
    char kind[8], name[64];
    int major, minor, multiprocessors, integrated;
};
static struct device devices[8];
static int count, answer, version;

static void look(void) {
    FILE *file = fopen(getenv("FAKE_GPUS"), "r");
    char line[256], hex[40];
    count = 0;
    if (!file || !fgets(line, sizeof line, file) || sscanf(line, "%d %d", &answer, &version) != 2)
        abort();
    while (count < 8 && fgets(line, sizeof line, file)) {
        struct device *d = &devices[count++];
        if (sscanf(line, "%39s %llu %lld %7s %d %d %d %d %63[^\n]", hex, &d->bytes, &d->free, d->kind,
                   &d->major, &d->minor, &d->multiprocessors, &d->integrated, d->name) != 9)
            abort();
        for (int i = 0; i < 16; i++) sscanf(hex + 2 * i, "%2hhx", &d->uuid[i]);
    }
    fclose(file);
}

int cuInit(unsigned flags) { look(); return flags ? 1 : answer; }
int cuDriverGetVersion(int *out) { *out = version; return 0; }
int cuDeviceGetCount(int *out) { *out = count; return 0; }
int cuDeviceGet(int *out, int index) { *out = 100 + index; return 0; }
int cuDeviceGetName(char *out, int size, int device) {
    snprintf(out, size, "%s", devices[device - 100].name);
    return 0;
}
int cuDeviceGetUuid(void *out, int device) { memset(out, 0, 16); return 0; }
int cuDeviceGetUuid_v2(void *out, int device) {
    memcpy(out, devices[device - 100].uuid, 16);
    return 0;
}
int cuDeviceTotalMem_v2(size_t *out, int device) {
    *out = devices[device - 100].bytes;
    return *out ? 0 : 999; /* A device without memory has fallen off its bus. */
}
int cuDeviceGetAttribute(int *out, int number, int device) {
    struct device *d = &devices[device - 100];
    *out = number == 75 ? d->major : number == 76 ? d->minor : number == 16 ? d->multiprocessors
         : number == 18 ? d->integrated : number == 97 ? 101376 : -1;
    return 0;
}

int nvmlInit_v2(void) { look(); return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    for (int i = 0; i < count; i++) {
        char name[64];
        unsigned char *u = devices[i].uuid;
        snprintf(name, sizeof name,
                 "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                 devices[i].kind, u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10],
                 u[11], u[12], u[13], u[14], u[15]);
        if (!strcmp(name, uuid)) { *out = &devices[i]; return 0; }
    }
    return 6; /* NVML_ERROR_NOT_FOUND */
}
int nvmlDeviceGetMemoryInfo(struct device *d, unsigned long long *out) {
    if (d->free < 0) return 3; /* NVML_ERROR_NOT_SUPPORTED */
    out[0] = d->bytes; out[1] = d->free; out[2] = d->bytes - d->free;
    return 0;
}
