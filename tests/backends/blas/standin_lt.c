// A stand-in for cuBLASLt, computing on host memory, for tests: cublasLtMatmul and all that leads to it.
//
// An algorithm carries everything that it was chosen for, and a product whose matrices, addresses, workspace or switches
// are not those is refused: what the real library would compute wrongly is an error here. Handles may be shared by
// threads; a workspace that two products have at once is counted. Options at compile time:
//   -DWITHOUT_HEURISTIC   no cublasLtMatmulAlgoGetHeuristic
//   -DWITHOUT_VERSION     no cublasLtGetVersion
//   -DWITHOUT_ALGORITHM   products run without an algorithm, and only so; with any workspace and alignment
#include "standin.c"

enum object_kind { OPERATION = 1, LAYOUT, PREFERENCE };

// What the three kinds of descriptions hold; never freed, as handles.
struct object {
    struct object* next;
    int kind;
    bool alive, forgotten;
    int compute, scale, transa, transb;           // of an operation
    int type, batch;                              // of a layout
    uint64_t rows, columns;
    int64_t ld, step;
    uint64_t most_workspace;                      // of a preference
    uint32_t reductions, alignments[4];
};
static struct object* objects;

// What an algorithm's 64 bytes are here.
struct algorithm {
    uint32_t magic, hash, compute, reductions;
    uint32_t alignments[4];
    uint64_t workspace, reserved[3];
};
_Static_assert(sizeof(struct algorithm) == 64, "cublasLtMatmulAlgo_t has 64 bytes");

struct result {
    struct algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
_Static_assert(sizeof(struct result) == 96, "cublasLtMatmulHeuristicResult_t has 96 bytes");

enum { MAGIC = 0x4c74, BUSY = 64 };
#ifdef WITHOUT_ALGORITHM
enum { NEEDS_ALGORITHM = 0 };
#else
enum { NEEDS_ALGORITHM = 1 };
#endif
static int found_count = 1, found_state;
static float first_waves = 1;  // of the first algorithm
static bool in_one_kernel;     // the second one that is found needs no workspace
static const void* busy[BUSY];  // workspaces of products that run

// ---- Control functions

// How many algorithms the next searches find, and the status that a result carries.
void standin_lt_find(int count, int state) {
    pthread_mutex_lock(&lock);
    found_count = count;
    found_state = state;
    pthread_mutex_unlock(&lock);
}

// The second algorithm that searches find needs no workspace and has a wave, the first one as many as this.
void standin_lt_propose(float waves) {
    pthread_mutex_lock(&lock);
    found_count = 2;
    first_waves = waves;
    in_one_kernel = true;
    pthread_mutex_unlock(&lock);
}

void standin_lt_reset(void) {
    pthread_mutex_lock(&lock);
    first_waves = 1;
    in_one_kernel = false;
    for (struct object* o = objects; o != NULL; o = o->next) o->alive = false, o->forgotten = true;
    found_count = 1;
    found_state = SUCCESS;
    pthread_mutex_unlock(&lock);
}

int standin_lt_live_objects(void) {
    int live = 0;
    pthread_mutex_lock(&lock);
    for (struct object* o = objects; o != NULL; o = o->next) live += o->alive;
    pthread_mutex_unlock(&lock);
    return live;
}

// ---- Handles and descriptions

#ifndef WITHOUT_VERSION
size_t cublasLtGetVersion(void) { return 130100; }
#endif

int cublasLtCreate(void** handle) {
    pthread_mutex_lock(&lock);
    int status = injected("cublasLtCreate");
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

int cublasLtDestroy(void* handle) { return destroy("cublasLtDestroy", handle); }

static struct object* known(const void* object) {
    struct object* o = objects;
    while (o != NULL && o != object) o = o->next;
    return o;
}

static struct object* living(const void* object, int kind) {
    struct object* o = known(object);
    return o != NULL && o->alive && o->kind == kind ? o : NULL;
}

static int make(const char* function, void** object, struct object value) {
    pthread_mutex_lock(&lock);
    int status = injected(function);
    struct object* o = NULL;
    if (status == SUCCESS && object == NULL) status = INVALID_VALUE;
    if (status == SUCCESS && (o = malloc(sizeof *o)) == NULL) status = ALLOC_FAILED;
    if (status == SUCCESS) {
        *o = value;
        o->alive = true;
        o->next = objects;
        *object = objects = o;
    }
    record(status, "%s", function);
    pthread_mutex_unlock(&lock);
    return status;
}

static int drop(const char* function, void* object, int kind) {
    pthread_mutex_lock(&lock);
    struct object* o = known(object);
    int status = INVALID_VALUE;
    if (o == NULL || !o->forgotten) {
        status = injected(function);
        if (status == SUCCESS && living(object, kind) == NULL) status = INVALID_VALUE;
        if (status == SUCCESS) o->alive = false;
        record(status, "%s", function);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

// As the real library: the size must be that of the attribute.
static int put(void* to, size_t size, const void* from, size_t given) {
    if (to == NULL || from == NULL || size != given) return INVALID_VALUE;
    memcpy(to, from, size);
    return SUCCESS;
}

int cublasLtMatmulDescCreate(void** object, int compute, int scale) {
    struct object value = {.kind = OPERATION, .compute = compute, .scale = scale};
    return make("cublasLtMatmulDescCreate", object, value);
}

int cublasLtMatmulDescDestroy(void* object) { return drop("cublasLtMatmulDescDestroy", object, OPERATION); }

int cublasLtMatmulDescSetAttribute(void* object, int attribute, const void* from, size_t size) {
    pthread_mutex_lock(&lock);
    int status = injected("cublasLtMatmulDescSetAttribute");
    struct object* o = living(object, OPERATION);
    int* to = o == NULL ? NULL : attribute == 3 ? &o->transa : attribute == 4 ? &o->transb : NULL;
    if (status == SUCCESS) status = put(to, sizeof *to, from, size);
    record(status, "cublasLtMatmulDescSetAttribute %d", attribute);
    pthread_mutex_unlock(&lock);
    return status;
}

int cublasLtMatrixLayoutCreate(void** object, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    struct object value = {.kind = LAYOUT, .type = type, .rows = rows, .columns = columns, .ld = ld, .batch = 1};
    return make("cublasLtMatrixLayoutCreate", object, value);
}

int cublasLtMatrixLayoutDestroy(void* object) { return drop("cublasLtMatrixLayoutDestroy", object, LAYOUT); }

int cublasLtMatrixLayoutSetAttribute(void* object, int attribute, const void* from, size_t size) {
    pthread_mutex_lock(&lock);
    int status = injected("cublasLtMatrixLayoutSetAttribute");
    struct object* o = living(object, LAYOUT);
    void* to = o == NULL ? NULL : attribute == 5 ? (void*)&o->batch : attribute == 6 ? (void*)&o->step : NULL;
    if (status == SUCCESS) status = put(to, attribute == 5 ? sizeof o->batch : sizeof o->step, from, size);
    record(status, "cublasLtMatrixLayoutSetAttribute %d", attribute);
    pthread_mutex_unlock(&lock);
    return status;
}

int cublasLtMatmulPreferenceCreate(void** object) {
    struct object value = {.kind = PREFERENCE, .reductions = 7, .alignments = {256, 256, 256, 256}};
    return make("cublasLtMatmulPreferenceCreate", object, value);
}

int cublasLtMatmulPreferenceDestroy(void* object) { return drop("cublasLtMatmulPreferenceDestroy", object, PREFERENCE); }

int cublasLtMatmulPreferenceSetAttribute(void* object, int attribute, const void* from, size_t size) {
    pthread_mutex_lock(&lock);
    int status = injected("cublasLtMatmulPreferenceSetAttribute");
    struct object* o = living(object, PREFERENCE);
    void* to = NULL;
    if (o != NULL && attribute == 1) to = &o->most_workspace;
    if (o != NULL && attribute == 3) to = &o->reductions;
    if (o != NULL && attribute >= 5 && attribute <= 8) to = &o->alignments[attribute - 5];
    if (status == SUCCESS) status = put(to, attribute == 1 ? sizeof o->most_workspace : sizeof o->reductions, from, size);
    record(status, "cublasLtMatmulPreferenceSetAttribute %d", attribute);
    pthread_mutex_unlock(&lock);
    return status;
}

// ---- Products

struct described {
    const struct object *operation, *a, *b, *c, *d;
};

// Fits together, and is something that the library has. The lock is held.
static int check_described(const struct described* p) {
    if (p->operation == NULL || p->a == NULL || p->b == NULL || p->c == NULL || p->d == NULL) return INVALID_VALUE;
    const struct object *op = p->operation, *layouts[4] = {p->a, p->b, p->c, p->d};
    uint64_t m = op->transa ? p->a->columns : p->a->rows, k = op->transa ? p->a->rows : p->a->columns;
    uint64_t n = op->transb ? p->b->rows : p->b->columns;
    if ((op->transb ? p->b->columns : p->b->rows) != k) return INVALID_VALUE;
    for (int i = 0; i < 4; i++) {
        const struct object* x = layouts[i];
        if (x->rows == 0 || x->columns == 0 || x->ld < (int64_t)x->rows || x->batch != p->d->batch || x->batch < 1)
            return INVALID_VALUE;
        if (i > 1 && (x->rows != m || x->columns != n)) return INVALID_VALUE;
    }
    if (p->d->batch > 1 && p->d->step == 0) return INVALID_VALUE;
    bool known = type_known(p->a->type) && p->b->type == p->a->type && p->c->type == p->d->type &&
                 (p->d->type == p->a->type || p->d->type == R_32F);
    bool fast = op->compute == COMPUTE_32F_FAST_TF32 && p->a->type == R_32F;
    return known && op->scale == R_32F && (op->compute == COMPUTE_32F || fast) ? SUCCESS : NOT_SUPPORTED;
}

// A number that tells one described product from another (well enough for tests).
static uint32_t hash(const struct described* p) {
    const struct object* layouts[4] = {p->a, p->b, p->c, p->d};
    uint64_t value = (uint64_t)(p->operation->compute * 4 + p->operation->transa * 2 + p->operation->transb);
    for (int i = 0; i < 4; i++) {
        const struct object* x = layouts[i];
        uint64_t words[6] = {(uint64_t)x->type,  x->rows, x->columns, (uint64_t)x->ld, (uint64_t)x->step,
                             (uint64_t)x->batch};
        for (int j = 0; j < 6; j++) value = (value ^ words[j]) * 0x100000001b3ull + 11;
    }
    return (uint32_t)(value ^ value >> 32);
}

static struct described described(void* operation, void* a, void* b, void* c, void* d) {
    struct described p = {living(operation, OPERATION), living(a, LAYOUT), living(b, LAYOUT), living(c, LAYOUT),
                          living(d, LAYOUT)};
    return p;
}

static struct product product_of(const struct described* p) {
    struct product q = {0};
    q.transa = p->operation->transa, q.transb = p->operation->transb;
    q.m = (int)p->d->rows, q.n = (int)p->d->columns;
    q.k = (int)(q.transa ? p->a->rows : p->a->columns);
    q.lda = (int)p->a->ld, q.ldb = (int)p->b->ld, q.ldc = (int)p->d->ld, q.batch = p->d->batch;
    q.step_a = p->a->step, q.step_b = p->b->step, q.step_c = p->d->step;
    return q;
}

#ifndef WITHOUT_HEURISTIC
// A K of 32 and more needs a workspace.
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference,
                                   int requested, struct result* results, int* count) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasLtMatmulAlgoGetHeuristic", handle, h);
    struct described p = described(operation, a, b, c, d);
    const struct object* wish = living(preference, PREFERENCE);
    if (status == SUCCESS && (wish == NULL || results == NULL || count == NULL || requested < 1)) status = INVALID_VALUE;
    if (status == SUCCESS) status = check_described(&p);
    if (status == SUCCESS) {
        struct algorithm algorithm = {.magic = MAGIC, .hash = hash(&p), .compute = (uint32_t)p.operation->compute};
        struct product q = product_of(&p);
        algorithm.reductions = wish->reductions;
        memcpy(algorithm.alignments, wish->alignments, sizeof algorithm.alignments);
        algorithm.workspace = q.k >= 32 && wish->most_workspace >= 1024 ? 1024 : 0;
        *count = found_count < requested ? found_count : requested;
        memset(results, 0, requested * sizeof *results);
        for (int i = 0; i < *count; i++) {
            if (i == 1 && in_one_kernel) algorithm.workspace = 0;
            results[i].algorithm = algorithm;
            results[i].workspace = algorithm.workspace;
            results[i].state = found_state;
            results[i].waves = i == 0 ? first_waves : 1;
        }
        const uint32_t* at = wish->alignments;
        record(status, "choose %s m=%d n=%d k=%d compute=%d reductions=%u most=%llu align=%u,%u,%u,%u found=%d", name(h),
               q.m, q.n, q.k, p.operation->compute, wish->reductions, (unsigned long long)wish->most_workspace, at[0],
               at[1], at[2], at[3], *count);
    } else {
        record(status, "choose %s", name(h));
    }
    pthread_mutex_unlock(&lock);
    return status;
}
#endif

static bool aligned(const void* address, uint32_t to) { return ADDRESS(address) % to == 0; }

// Whether the algorithm, if one is needed, was chosen for just this. The lock is held.
static bool fits(const struct algorithm* algorithm, const struct described* p, const void* const addresses[4],
                 size_t bytes) {
    if (!NEEDS_ALGORITHM) return algorithm == NULL;
    if (algorithm == NULL || algorithm->magic != MAGIC || algorithm->hash != hash(p) ||
        algorithm->compute != (uint32_t)p->operation->compute || algorithm->workspace > bytes)
        return false;
    for (int i = 0; i < 4; i++)
        if (!aligned(addresses[i], algorithm->alignments[i])) return false;
    return true;
}

int cublasLtMatmul(void* handle, void* operation, const void* alpha, const void* A, void* a, const void* B, void* b,
                   const void* beta, const void* C, void* c, void* D, void* d, const struct algorithm* algorithm,
                   void* workspace, size_t bytes, void* stream) {
    pthread_mutex_lock(&lock);
    struct handle* h = find(handle);
    int status = enter("cublasLtMatmul", handle, h), slot = -1;
    struct described p = described(operation, a, b, c, d);
    if (status == SUCCESS) status = check_described(&p);
    const void* const addresses[4] = {A, B, C, D};
    if (status == SUCCESS &&
        (alpha == NULL || beta == NULL || A == NULL || B == NULL || C == NULL || D == NULL ||
         !fits(algorithm, &p, addresses, bytes) || (bytes > 0 && workspace == NULL) || !aligned(workspace, 16) ||
         (C == D && (p.c->ld != p.d->ld || p.c->step != p.d->step))))
        status = INVALID_VALUE;
    if (p.operation == NULL || p.a == NULL || p.b == NULL || p.c == NULL || p.d == NULL) {
        record(status, "matmul %s", name(h));
        pthread_mutex_unlock(&lock);
        return status;
    }
    struct product q = product_of(&p);
    record(status,
           "matmul %s stream=0x%llx ta=%d tb=%d m=%d n=%d k=%d lda=%d ldb=%d ldc=%d ldd=%d sa=%lld sb=%lld sc=%lld "
           "sd=%lld batch=%d types=%d,%d,%d compute=%d reductions=%u apart=%d workspace=0x%llx bytes=%zu",
           name(h), ADDRESS(stream), q.transa, q.transb, q.m, q.n, q.k, q.lda, q.ldb, (int)p.c->ld, q.ldc, q.step_a,
           q.step_b, (long long)p.c->step, q.step_c, q.batch, p.a->type, p.b->type, p.d->type, p.operation->compute,
           algorithm == NULL ? 0 : algorithm->reductions, C != D, ADDRESS(workspace), bytes);
    struct kinds kinds = {p.a->type, p.b->type, p.d->type, p.operation->compute};
    struct source source = {C, (int)p.c->ld, p.c->step};
    for (int i = 0; i < BUSY && status == SUCCESS && workspace != NULL; i++) {
        if (busy[i] == workspace) overlaps++;
        if (busy[i] == NULL && slot < 0) busy[slot = i] = workspace;
    }
    pthread_mutex_unlock(&lock);
    if (status != SUCCESS) return status;
    wait_a_while();
    q.alpha = alpha, q.beta = beta, q.A = A, q.B = B, q.C = D;
    status = compute(&q, kinds, &source);
    if (slot >= 0) {
        pthread_mutex_lock(&lock);
        busy[slot] = NULL;
        pthread_mutex_unlock(&lock);
    }
    return status;
}
