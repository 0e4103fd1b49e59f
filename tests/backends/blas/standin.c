// A stand-in for a vendor library with cuBLAS's C interface, computing on host memory, for tests.
//
// It checks its arguments as cuBLAS does, logs every call, fails on request, and notices a handle that two threads use
// at once. Options at compile time:
//   -DSTANDIN_RUNTIME     only xpu_wait (and the control functions): the vendor's runtime library
//   -DWITHOUT_WORKSPACE   no cublasSetWorkspace_v2
//   -DWITHOUT_GEMM        no products at all
//   -DONLY_BATCHES        no cublasGemmEx, no cublasGemmGroupedBatchedEx, no cublasSetMathMode
//   -DNO_BF16             gemm knows no bf16 (cublasLt, if it is in the same library, does)
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

#define ADDRESS(pointer) ((unsigned long long)(uintptr_t)(pointer))  // printed with %llx: %p prints null as (nil)

// Guards everything down to the control functions, and what handles hold; never held while computing.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- The log

static char* text;
static size_t text_length, text_room;

// One line: the call, and " -> status" if it did not succeed. The lock is held.
static void record(int status, const char* format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line - 32, format, arguments);
    va_end(arguments);
    size_t length = strlen(line);
    if (status != SUCCESS) length += (size_t)snprintf(line + length, 31, " -> %d", status);
    line[length++] = '\n';
    if (text_length + length + 1 > text_room) {
        text_room = 2 * text_room + 1024;
        text = realloc(text, text_room);
        if (text == NULL) abort();
    }
    memcpy(text + text_length, line, length);
    text_length += length;
    text[text_length] = 0;
}

// ---- Failures on request

static struct failure {
    const char* function;
    int status, times;
} failures[] = {
    {"cublasCreate_v2", 0, 0},
    {"cublasDestroy_v2", 0, 0},
    {"cublasSetStream_v2", 0, 0},
    {"cublasSetMathMode", 0, 0},
    {"cublasSetWorkspace_v2", 0, 0},
    {"cublasGemmEx", 0, 0},
    {"cublasGemmStridedBatchedEx", 0, 0},
    {"cublasGemmGroupedBatchedEx", 0, 0},
    {"cublasLtCreate", 0, 0},
    {"cublasLtDestroy", 0, 0},
    {"cublasLtMatmulDescCreate", 0, 0},
    {"cublasLtMatmulDescSetAttribute", 0, 0},
    {"cublasLtMatmulDescDestroy", 0, 0},
    {"cublasLtMatrixLayoutCreate", 0, 0},
    {"cublasLtMatrixLayoutSetAttribute", 0, 0},
    {"cublasLtMatrixLayoutDestroy", 0, 0},
    {"cublasLtMatmulPreferenceCreate", 0, 0},
    {"cublasLtMatmulPreferenceSetAttribute", 0, 0},
    {"cublasLtMatmulPreferenceDestroy", 0, 0},
    {"cublasLtMatmulAlgoGetHeuristic", 0, 0},
    {"cublasLtMatmul", 0, 0},
    {"xpu_wait", 0, 0},
};
enum { FUNCTIONS = sizeof failures / sizeof *failures };

static struct failure* failure_of(const char* function) {
    for (int i = 0; i < FUNCTIONS; i++)
        if (strcmp(failures[i].function, function) == 0) return &failures[i];
    abort();  // no such function
}

// The status this call was told to fail with, or SUCCESS. The lock is held.
static int injected(const char* function) {
    struct failure* failure = failure_of(function);
    if (failure->times == 0) return SUCCESS;
    failure->times--;
    return failure->status;
}

// ---- Handles. They are never freed: no address serves twice, so a stale handle is always told from a live one.

struct handle {
    struct handle* next;
    char name[16];
    bool alive, forgotten;  // of before a reset: that it is destroyed, whenever it is collected, is not worth a line
    int busy;  // how many products are inside
    int mode;
    void* stream;
    void* workspace;
};
static struct handle* handles;
static int created, overlaps, delay_us;

// ---- Control functions

void standin_reset(void) {
    pthread_mutex_lock(&lock);
    for (struct handle* h = handles; h != NULL; h = h->next) {
        h->alive = false;
        h->forgotten = true;
        strcpy(h->name, "h?");
    }
    for (int i = 0; i < FUNCTIONS; i++) failures[i].times = 0;
    created = overlaps = delay_us = 0;
    text_length = 0;
    if (text != NULL) text[0] = 0;
    pthread_mutex_unlock(&lock);
}

void standin_fail(const char* function, int status, int times) {
    pthread_mutex_lock(&lock);
    struct failure* failure = failure_of(function);
    failure->status = status;
    failure->times = times;
    pthread_mutex_unlock(&lock);
}

// A copy, which lives until this thread asks again: other threads may go on writing.
const char* standin_log(void) {
    static _Thread_local char* copy;
    pthread_mutex_lock(&lock);
    free(copy);
    copy = calloc(text_length + 1, 1);
    if (copy == NULL) abort();
    if (text_length > 0) memcpy(copy, text, text_length);
    pthread_mutex_unlock(&lock);
    return copy;
}

int standin_live_handles(void) {
    int live = 0;
    pthread_mutex_lock(&lock);
    for (struct handle* h = handles; h != NULL; h = h->next) live += h->alive;
    pthread_mutex_unlock(&lock);
    return live;
}

int standin_overlaps(void) {
    pthread_mutex_lock(&lock);
    int count = overlaps;
    pthread_mutex_unlock(&lock);
    return count;
}

void standin_set_delay(int us) {
    pthread_mutex_lock(&lock);
    delay_us = us;
    pthread_mutex_unlock(&lock);
}

#ifdef STANDIN_RUNTIME

int xpu_wait(void* stream) {
    pthread_mutex_lock(&lock);
    int status = injected("xpu_wait");
    record(status, "wait 0x%llx", ADDRESS(stream));
    pthread_mutex_unlock(&lock);
    return status;
}

#else

static struct handle* find(const void* handle) {
    struct handle* h = handles;
    while (h != NULL && h != handle) h = h->next;
    return h;
}

static const char* name(const struct handle* h) { return h == NULL ? "h?" : h->name; }

// What every function that takes a handle does first. The lock is held.
static int enter(const char* function, const void* handle, const struct handle* h) {
    int status = injected(function);
    if (status != SUCCESS) return status;
    if (handle == NULL) return INVALID_VALUE;
    if (h == NULL || !h->alive) return NOT_INITIALIZED;
    if (h->busy > 0) overlaps++;
    return SUCCESS;
}

int cublasCreate_v2(void** handle) {
    pthread_mutex_lock(&lock);
    int status = injected("cublasCreate_v2");
    struct handle* h = NULL;
    if (status == SUCCESS && handle == NULL) status = INVALID_VALUE;
    if (status == SUCCESS && (h = calloc(1, sizeof *h)) == NULL) status = ALLOC_FAILED;
    if (status == SUCCESS) {
        snprintf(h->name, sizeof h->name, "h%d", ++created);
        h->alive = true;
        h->next = handles;
        *handle = handles = h;
    }
    record(status, h == NULL ? "create" : "create %s", name(h));
    pthread_mutex_unlock(&lock);
    return status;
}

static int destroy(const char* function, void* handle) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = NOT_INITIALIZED;
    if (h == NULL || !h->forgotten) {
        status = enter(function, handle, h);
        if (status == SUCCESS) h->alive = false;
        record(status, "destroy %s", name(h));
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int cublasDestroy_v2(void* handle) { return destroy("cublasDestroy_v2", handle); }

int cublasSetStream_v2(void* handle, void* stream) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasSetStream_v2", handle, h);
    if (status == SUCCESS) {
        h->stream = stream;
        h->workspace = NULL;  // as documented: the library's own from here on
    }
    record(status, "set_stream %s 0x%llx", name(h), ADDRESS(stream));
    pthread_mutex_unlock(&lock);
    return status;
}

#ifndef ONLY_BATCHES
int cublasSetMathMode(void* handle, int mode) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasSetMathMode", handle, h);
    int base = mode & ~16;  // 16: no reductions in reduced precision; 0 to 3: default, tensor op, pedantic, TF32
    if (status == SUCCESS && (base < 0 || base > 3)) status = INVALID_VALUE;
    if (status == SUCCESS) h->mode = mode;
    record(status, "set_math_mode %s %d", name(h), mode);
    pthread_mutex_unlock(&lock);
    return status;
}
#endif

#ifndef WITHOUT_WORKSPACE
int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasSetWorkspace_v2", handle, h);
    if (status == SUCCESS && workspace == NULL && bytes > 0) status = INVALID_VALUE;
    if (status == SUCCESS) h->workspace = workspace;
    record(status, "set_workspace %s 0x%llx %zu", name(h), ADDRESS(workspace), bytes);
    pthread_mutex_unlock(&lock);
    return status;
}
#endif

#ifndef WITHOUT_GEMM

enum { R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };

static double load(const void* data, int type, ptrdiff_t i) {
    if (type == R_32F) return ((const float*)data)[i];
    uint16_t bits = ((const uint16_t*)data)[i];
    if (type == R_16BF) {
        uint32_t wide = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                  : exponent == 0 ? ldexp(fraction, -24)
                                  : ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 ? -size : size;
}

// A finite x >= 0 as the 16 bits after the sign: rounded once, to nearest, ties to even. `fraction` bits follow the
// leading one; the smallest normal number is 2 to the power `lowest`, its predecessors are spaced as its successors.
static unsigned encode(double x, int fraction, int lowest) {
    int exponent = x == 0 || ilogb(x) < lowest ? lowest : ilogb(x);
    unsigned steps = (unsigned)nearbyint(ldexp(x, fraction - exponent));  // 2^fraction and more for normal numbers
    return ((unsigned)(exponent - lowest) << fraction) + steps;           // a carry moves on to the next exponent
}

static void store(void* data, int type, ptrdiff_t i, double x) {
    if (type == R_32F) {
        ((float*)data)[i] = (float)x;
        return;
    }
    // What follows the largest finite number, 2^16 or 2^128, has the bits of infinity: larger ones become that.
    unsigned bits = isnan(x)        ? 0x7fff
                    : type == R_16F ? encode(fmin(fabs(x), 0x1p16), 10, -14)
                                    : encode(fmin(fabs(x), 0x1p128), 7, -126);
    ((uint16_t*)data)[i] = (uint16_t)(bits | (signbit(x) ? 0x8000u : 0));
}

static bool type_known(int type) { return type == R_32F || type == R_16F || type == R_16BF; }

static bool handles_know(int type) {
#ifdef NO_BF16
    if (type == R_16BF) return false;
#endif
    return type_known(type);
}

// `lines` lines of k elements, as doubles. Line i, element p is at i * line_step + p * step.
static void pack(double* to, const void* from, int type, int lines, int k, ptrdiff_t start, ptrdiff_t line_step,
                 ptrdiff_t step) {
    for (int i = 0; i < lines; i++)
        for (int p = 0; p < k; p++) *to++ = load(from, type, start + i * line_step + p * step);
}

// One product, or a batch of them, as all three functions take it.
struct product {
    int transa, transb, m, n, k;
    const float *alpha, *beta;
    const void *A, *B;
    void* C;
    int lda, ldb, ldc, batch;
    long long step_a, step_b, step_c;
};

struct kinds {
    int a, b, c, compute;
};

static bool is_empty(const struct product* p) { return p->m == 0 || p->n == 0 || p->batch == 0; }

static int check(const struct product* p, struct kinds kinds) {
    if (p->transa < 0 || p->transa > 2 || p->transb < 0 || p->transb > 2 || p->m < 0 || p->n < 0 || p->k < 0 ||
        p->batch < 0 || p->lda < 1 || p->lda < (p->transa ? p->k : p->m) || p->ldb < 1 ||
        p->ldb < (p->transb ? p->n : p->k) || p->ldc < 1 || p->ldc < p->m || p->alpha == NULL || p->beta == NULL ||
        (!is_empty(p) && (p->C == NULL || (p->k > 0 && (p->A == NULL || p->B == NULL)))))
        return INVALID_VALUE;
    bool known = handles_know(kinds.a) && kinds.b == kinds.a && (kinds.c == kinds.a || kinds.c == R_32F);
    bool fast = kinds.compute == COMPUTE_32F_FAST_TF32 && kinds.a == R_32F;
    return known && (kinds.compute == COMPUTE_32F || fast) ? SUCCESS : NOT_SUPPORTED;
}

static bool algorithm_known(int algo) { return (algo >= -1 && algo <= 23) || (algo >= 99 && algo <= 115); }

// The lock is held.
static void record_product(const char* label, int status, const struct handle* h, const struct product* p,
                           struct kinds kinds) {
    record(status,
           "%s %s stream=0x%llx ta=%d tb=%d m=%d n=%d k=%d lda=%d ldb=%d ldc=%d sa=%lld sb=%lld sc=%lld batch=%d "
           "types=%d,%d,%d compute=%d mode=%d workspace=0x%llx",
           label, name(h), ADDRESS(h == NULL ? NULL : h->stream), p->transa, p->transb, p->m, p->n, p->k, p->lda,
           p->ldb, p->ldc, p->step_a, p->step_b, p->step_c, p->batch, kinds.a, kinds.b, kinds.c, kinds.compute,
           h == NULL ? 0 : h->mode, ADDRESS(h == NULL ? NULL : h->workspace));
}

// Where C is read, if that is not where the result goes.
struct source {
    const void* C;
    int ldc;
    long long step;
};

static int compute(const struct product* p, struct kinds kinds, const struct source* c) {
    if (is_empty(p)) return SUCCESS;
    struct source own = {p->C, p->ldc, p->step_c};
    if (c == NULL) c = &own;
    size_t m = (size_t)p->m, n = (size_t)p->n, k = (size_t)p->k;
    double a_factor = *p->alpha, c_factor = *p->beta;
    double* rows = malloc(((m + n) * k + 1) * sizeof *rows);
    double* columns = rows + m * k;
    if (rows == NULL) return ALLOC_FAILED;
    for (int item = 0; item < p->batch; item++) {
        pack(rows, p->A, kinds.a, p->m, p->k, item * p->step_a, p->transa ? p->lda : 1, p->transa ? 1 : p->lda);
        pack(columns, p->B, kinds.b, p->n, p->k, item * p->step_b, p->transb ? 1 : p->ldb, p->transb ? p->ldb : 1);
        for (size_t j = 0; j < n; j++) {
            for (size_t i = 0; i < m; i++) {
                double sum = 0;
                for (size_t q = 0; q < k; q++) sum += rows[i * k + q] * columns[j * k + q];
                ptrdiff_t at = item * p->step_c + (ptrdiff_t)j * p->ldc + (ptrdiff_t)i;
                sum *= a_factor;
                if (c_factor != 0)
                    sum += c_factor * load(c->C, kinds.c, item * c->step + (ptrdiff_t)j * c->ldc + (ptrdiff_t)i);
                store(p->C, kinds.c, at, sum);
            }
        }
    }
    free(rows);
    return SUCCESS;
}

static void wait_a_while(void) {
    pthread_mutex_lock(&lock);
    struct timespec delay = {delay_us / 1000000, delay_us % 1000000 * 1000L};
    pthread_mutex_unlock(&lock);
    if (delay.tv_sec > 0 || delay.tv_nsec > 0) nanosleep(&delay, NULL);
}

// Computes with the handle marked as busy.
static int run(struct handle* h, const struct product* products, int count, struct kinds kinds) {
    wait_a_while();
    int status = SUCCESS;
    for (int i = 0; i < count && status == SUCCESS; i++) status = compute(&products[i], kinds, NULL);
    pthread_mutex_lock(&lock);
    h->busy--;
    pthread_mutex_unlock(&lock);
    return status;
}

static int one(const char* function, const char* label, void* handle, struct product p, struct kinds kinds, int algo) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter(function, handle, h);
    if (status == SUCCESS) status = check(&p, kinds);
    if (status == SUCCESS && !algorithm_known(algo)) status = NOT_SUPPORTED;
    record_product(label, status, h, &p, kinds);
    if (status == SUCCESS) h->busy++;
    pthread_mutex_unlock(&lock);
    return status == SUCCESS ? run(h, &p, 1, kinds) : status;
}

int cublasGemmStridedBatchedEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha,
                               const void* A, int Atype, int lda, long long strideA, const void* B, int Btype, int ldb,
                               long long strideB, const void* beta, void* C, int Ctype, int ldc, long long strideC,
                               int batch, int computeType, int algo) {
    struct product p = {transa, transb, m,   n,     k,       alpha,   beta,   A, B, C,
                        lda,    ldb,    ldc, batch, strideA, strideB, strideC};
    struct kinds kinds = {Atype, Btype, Ctype, computeType};
    return one("cublasGemmStridedBatchedEx", "gemm", handle, p, kinds, algo);
}

#ifndef ONLY_BATCHES

int cublasGemmEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha, const void* A, int Atype,
                 int lda, const void* B, int Btype, int ldb, const void* beta, void* C, int Ctype, int ldc,
                 int computeType, int algo) {
    struct product p = {transa, transb, m, n, k, alpha, beta, A, B, C, lda, ldb, ldc, 1, 0, 0, 0};
    struct kinds kinds = {Atype, Btype, Ctype, computeType};
    return one("cublasGemmEx", "gemm_single", handle, p, kinds, algo);
}

// The arrays of addresses are on the device, which here is the host. As cuBLAS has it, results have the type of the
// operands, and each matrix must begin at a multiple of 16 bytes; here, one that does not is noticed.
int cublasGemmGroupedBatchedEx(void* handle, const int* transa, const int* transb, const int* m, const int* n,
                               const int* k, const void* alpha, const void* const* A, int Atype, const int* lda,
                               const void* const* B, int Btype, const int* ldb, const void* beta, void* const* C,
                               int Ctype, const int* ldc, int group_count, const int* group_size, int computeType) {
    struct kinds kinds = {Atype, Btype, Ctype, computeType};
    int count = 0;
    for (int i = 0; i < group_count; i++) count += group_size[i];
    struct product* products = calloc((size_t)count + 1, sizeof *products);
    if (products == NULL) return ALLOC_FAILED;
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasGemmGroupedBatchedEx", handle, h);
    if (status == SUCCESS && Ctype != Atype) status = NOT_SUPPORTED;
    record(status, "gemm_grouped %s groups=%d", name(h), group_count);
    for (int i = 0, at = 0; i < group_count && status == SUCCESS; i++) {
        for (int j = 0; j < group_size[i] && status == SUCCESS; j++, at++) {
            const float *a_factor = (const float*)alpha + i, *c_factor = (const float*)beta + i;
            struct product p = {transa[i], transb[i], m[i],  n[i],   k[i],   a_factor, c_factor, A[at], B[at],
                                C[at],     lda[i],    ldb[i], ldc[i], 1,      0,        0,        0};
            products[at] = p;
            status = check(&p, kinds);
            if (status == SUCCESS && ((ADDRESS(A[at]) | ADDRESS(B[at]) | ADDRESS(C[at])) & 15)) status = INVALID_VALUE;
            record_product("group", status, h, &p, kinds);
        }
    }
    if (status == SUCCESS) h->busy++;
    pthread_mutex_unlock(&lock);
    if (status == SUCCESS) status = run(h, products, count, kinds);
    free(products);
    return status;
}

#endif  // ONLY_BATCHES
#endif  // WITHOUT_GEMM
#endif  // STANDIN_RUNTIME
