/* Stands in for libnvidia-ml.so.1 so that unmodified pynvml can be tested without a GPU.
 *
 * Each answer is read at the time of the call from the file $NVML_STANDIN: lines of "name value". Names are "init",
 * "gpus", and per GPU i "<call>.<i>" for a call's return code and "<value>.<i>" for what it measures. What is not in
 * the file succeeds with zero. "hang" stops the next call for good, as a wedged driver does.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned id; } gpu;
static gpu gpus[16];
static int told[16];

static long said(const char *name, int index, long otherwise) {
    char wanted[64], line[128], key[64];
    long value;
    const char *path = getenv("NVML_STANDIN");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (index < 0) snprintf(wanted, sizeof wanted, "%s", name);
    else snprintf(wanted, sizeof wanted, "%s.%d", name, index);
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%63s %ld", key, &value) == 2) {
            if (!strcmp(key, "hang")) pause();
            if (!strcmp(key, wanted)) otherwise = value;
        }
    if (file) fclose(file);
    return otherwise;
}

static int index_of(gpu *g) { return (int)(g - gpus); }
static long of(const char *name, gpu *g) { return said(name, index_of(g), 0); }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)said("init", -1, 0); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)said("gpus", -1, 2); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, gpu **g) { *g = &gpus[i]; return (int)of("handle", *g); }
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu **g) {
    int i = atoi(strrchr(uuid, '-') + 1);
    if (i >= said("gpus", -1, 2)) return 6;
    *g = &gpus[i];
    return (int)of("handle", *g);
}
int nvmlDeviceGetUUID(gpu *g, char *out, unsigned size) { snprintf(out, size, "GPU-standin-%d", index_of(g)); return 0; }
int nvmlDeviceGetName(gpu *g, char *out, unsigned size) { (void)g; snprintf(out, size, "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetMemoryInfo(gpu *g, unsigned long long *out) {
    out[0] = 80ULL << 30; out[2] = (unsigned long long)of("memory_used", g); out[1] = out[0] - out[2];
    return 0;
}
int nvmlDeviceGetTotalEccErrors(gpu *g, int type, int counter, unsigned long long *out) {
    (void)type; (void)counter;
    *out = (unsigned long long)of("ecc_errors", g);
    return (int)of("ecc", g);
}
int nvmlDeviceGetRemappedRows(gpu *g, unsigned *corr, unsigned *unc, unsigned *pending, unsigned *failure) {
    *corr = *unc = 0; *pending = (unsigned)of("remap_pending", g); *failure = (unsigned)of("remap_failure", g);
    return (int)of("remap", g);
}
typedef struct { uint32_t field, scope; int64_t at, latency; int type, result; union { unsigned ui; uint64_t ull; } value; } field;
int nvmlDeviceGetFieldValues(gpu *g, int count, field *values) {
    for (int i = 0; i < count; i++) {
        values[i].result = (int)of("recovery", g);
        values[i].value.ull = (uint64_t)of("recovery_action", g);
    }
    return 0;
}
int nvmlDeviceGetUtilizationRates(gpu *g, unsigned *out) { out[0] = (unsigned)of("busy", g); out[1] = 0; return 0; }
int nvmlDeviceGetTemperature(gpu *g, int sensor, unsigned *out) { (void)sensor; *out = 41; return (int)of("heat", g); }
int nvmlDeviceGetPowerUsage(gpu *g, unsigned *out) { (void)g; *out = 250000; return 0; }
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(gpu *g, unsigned *count, process *out) {
    long pid = of("holder", g);
    unsigned room = *count;
    *count = pid ? 1 : 0;
    if (!pid) return 0;
    if (!out || room < 1) return 7;
    out[0].pid = (unsigned)pid; out[0].memory = 1;
    return 0;
}
int nvmlEventSetCreate(void **set) { *set = told; return (int)said("events", -1, 0); }
int nvmlDeviceRegisterEvents(gpu *g, unsigned long long types, void *set) { (void)types; (void)set; return (int)of("register", g); }
typedef struct { gpu *device; unsigned long long type, data; unsigned gi, ci; } event;
int nvmlEventSetWait_v2(void *set, event *out, unsigned ms) {
    (void)set; (void)ms;
    for (int i = 0; i < said("gpus", -1, 2); i++) {
        int xid = (int)said("xid", i, 0);
        if (xid && told[i] != xid) {
            told[i] = xid;
            out->device = &gpus[i]; out->type = 8; out->data = (unsigned long long)xid;
            return 0;
        }
    }
    return 10;
}
