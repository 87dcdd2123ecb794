/* Counts the system calls by which a process changes files below a folder, and ends or fails the n-th of them.

   Preloaded (LD_PRELOAD), it stands before the C library's functions. A program says what it wants with
   crash_points_arm(): from then on calls on files below FOLDER are counted, from 1. Call number `at` is not made: the
   process is killed before it (errno_or_kill 0), or it fails with that errno, and with `stays` all after it too. A
   write() that is killed has written half of its bytes before. Calls in flight on several threads are counted as they
   come. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static atomic_long count, at;
static int failure, stays;

void crash_points_arm(const char *path, long number, int errno_or_kill, int for_good) {
    snprintf(folder, sizeof folder, "%s", path);
    count = 0, at = number, failure = errno_or_kill, stays = for_good;
}

long crash_points_count(void) { return count; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_below(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static void path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static int concerns_file(int descriptor) {
    char path[PATH_MAX];
    if (!folder[0]) return 0;
    path_of(descriptor, path);
    return is_below(path);
}

static int concerns(int base, const char *name) {
    char path[PATH_MAX];
    if (!folder[0]) return 0;
    if (name[0] == '/') return is_below(name);
    if (base == AT_FDCWD) return getcwd(path, sizeof path) != NULL && is_below(path);
    return concerns_file(base);
}

/* Whether the call may be made. */
static int is_hit(void) {
    long number = ++count;
    return number == at || (stays && at && number > at);
}

static int passes(void) {
    if (!is_hit()) return 1;
    if (!failure) kill(getpid(), SIGKILL), pause();
    errno = failure;
    return 0;
}

#define GUARD(condition, call) return (condition) && !passes() ? -1 : (call)

ssize_t write(int descriptor, const void *bytes, size_t size) {
    if (concerns_file(descriptor) && is_hit()) {
        if (!failure) {
            if (size > 1) REAL(write)(descriptor, bytes, size / 2);
            kill(getpid(), SIGKILL), pause();
        }
        errno = failure;
        return -1;
    }
    return REAL(write)(descriptor, bytes, size);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t size, off64_t offset) {
    GUARD(concerns_file(descriptor), REAL(pwrite64)(descriptor, bytes, size, offset));
}
ssize_t pwrite(int descriptor, const void *bytes, size_t size, off_t offset) {
    GUARD(concerns_file(descriptor), REAL(pwrite)(descriptor, bytes, size, offset));
}
ssize_t writev(int descriptor, const struct iovec *parts, int number) {
    GUARD(concerns_file(descriptor), REAL(writev)(descriptor, parts, number));
}
int fsync(int descriptor) { GUARD(concerns_file(descriptor), REAL(fsync)(descriptor)); }
int fdatasync(int descriptor) { GUARD(concerns_file(descriptor), REAL(fdatasync)(descriptor)); }
int ftruncate(int descriptor, off_t size) { GUARD(concerns_file(descriptor), REAL(ftruncate)(descriptor, size)); }
int ftruncate64(int descriptor, off64_t size) { GUARD(concerns_file(descriptor), REAL(ftruncate64)(descriptor, size)); }
int rename(const char *from, const char *to) { GUARD(concerns(AT_FDCWD, from), REAL(rename)(from, to)); }
int renameat(int base, const char *from, int other, const char *to) {
    GUARD(concerns(base, from), REAL(renameat)(base, from, other, to));
}
int link(const char *from, const char *to) { GUARD(concerns(AT_FDCWD, to), REAL(link)(from, to)); }
int symlink(const char *from, const char *to) { GUARD(concerns(AT_FDCWD, to), REAL(symlink)(from, to)); }
int unlink(const char *path) { GUARD(concerns(AT_FDCWD, path), REAL(unlink)(path)); }
int unlinkat(int base, const char *path, int flags) { GUARD(concerns(base, path), REAL(unlinkat)(base, path, flags)); }
int rmdir(const char *path) { GUARD(concerns(AT_FDCWD, path), REAL(rmdir)(path)); }
int mkdir(const char *path, mode_t mode) { GUARD(concerns(AT_FDCWD, path), REAL(mkdir)(path, mode)); }
int mkdirat(int base, const char *path, mode_t mode) { GUARD(concerns(base, path), REAL(mkdirat)(base, path, mode)); }
int truncate(const char *path, off_t size) { GUARD(concerns(AT_FDCWD, path), REAL(truncate)(path, size)); }

#define MODE(flags)                                                                                                    \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }
#define CHANGES(flags) ((flags) & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR))

int open(const char *path, int flags, ...) {
    MODE(flags)
    GUARD(CHANGES(flags) && concerns(AT_FDCWD, path), REAL(open)(path, flags, mode));
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    GUARD(CHANGES(flags) && concerns(AT_FDCWD, path), REAL(open64)(path, flags, mode));
}
int openat(int base, const char *path, int flags, ...) {
    MODE(flags)
    GUARD(CHANGES(flags) && concerns(base, path), REAL(openat)(base, path, flags, mode));
}
int openat64(int base, const char *path, int flags, ...) {
    MODE(flags)
    GUARD(CHANGES(flags) && concerns(base, path), REAL(openat64)(base, path, flags, mode));
}
