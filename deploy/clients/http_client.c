/* A client of a policy server in C, with plain sockets: plays episodes of a small game by HTTP.
 *
 *     cc -o http_client http_client.c && ./http_client HOST PORT EPISODES [TOKEN]
 *
 * The game: a counter goes from 0 to 4, and each step pays what the counter was. Prints one line of JSON an episode.
 * Each request has a connection of its own, so a lost one costs nothing but the same request again: the server takes no
 * step twice. The action is a number here; for other action spaces take a JSON parser.
 */
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 8192, TRIES = 200 };

static const char *host, *port, *token = "";
static char client[33], session[64];

static void random_hex(char *text, size_t digits) {
    FILE *source = fopen("/dev/urandom", "rb");
    if (source == NULL) exit(1);
    for (size_t i = 0; i < digits; i++) text[i] = "0123456789abcdef"[fgetc(source) & 15];
    text[digits] = '\0';
    fclose(source);
}

static int connect_to_server(void) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    if (getaddrinfo(host, port, &hints, &found) != 0) return -1;
    int connection = -1;
    for (struct addrinfo *at = found; at != NULL; at = at->ai_next) {
        connection = socket(at->ai_family, at->ai_socktype, at->ai_protocol);
        if (connection >= 0 && connect(connection, at->ai_addr, at->ai_addrlen) == 0) break;
        if (connection >= 0) close(connection);
        connection = -1;
    }
    freeaddrinfo(found);
    return connection;
}

/* One try: the status, and the whole answer in `answer`; 0 when the connection was lost. */
static int exchange(const char *method, const char *path, const char *body, char *answer) {
    char request[LARGEST];
    int size = snprintf(request, sizeof request,
                        "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nHeadrace-Client: %s\r\n"
                        "Authorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                        method, path, host, client, token, strlen(body), body);
    int connection = connect_to_server(), status = 0;
    if (connection < 0 || size >= (int)sizeof request) {
        if (connection >= 0) close(connection);
        return 0;
    }
    ssize_t count = 0, got = 0;
    for (ssize_t sent = 0; sent < size; sent += count)
        if ((count = send(connection, request + sent, size - sent, MSG_NOSIGNAL)) <= 0) goto lost;
    while (got < LARGEST - 1 && (count = recv(connection, answer + got, LARGEST - 1 - got, 0)) > 0) got += count;
    answer[got] = '\0';
    if (count == 0 && sscanf(answer, "HTTP/1.1 %d", &status) != 1) status = 0;
lost:
    close(connection);
    return status;
}

/* The same request again until it is answered. */
static void ask(const char *method, const char *path, const char *body, char *answer) {
    for (int tries = 0; tries < TRIES; tries++) {
        int status = exchange(method, path, body, answer);
        if (status >= 200 && status < 300) return;
        if (status != 0 && status != 503) break;
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    }
    fprintf(stderr, "%s %s is refused: %s\n", method, path, answer);
    exit(1);
}

static void play(int number) {
    char id[33], path[256], body[256], answer[LARGEST] = "";
    random_hex(id, 16);
    snprintf(path, sizeof path, "%s/episodes/c-%s", session, id);
    ask("PUT", path, "{\"training_enabled\": true}", answer);
    printf("{\"episode\": \"c-%s\", \"number\": %d, \"actions\": [", id, number);
    for (int counter = 0; counter <= 4; counter++) {
        snprintf(path, sizeof path, "%s/episodes/c-%s/steps/%d", session, id, counter);
        snprintf(body, sizeof body, "{\"observation\": [%d, 1], \"reward\": %d, \"end\": \"%s\"}", counter,
                 counter ? counter - 1 : 0, counter < 4 ? "no" : "terminated");
        ask("PUT", path, body, answer);
        if (counter == 4) break;
        const char *action = strstr(answer, "\"action\":");
        if (action == NULL) exit(1);
        printf("%s%ld", counter ? ", " : "", strtol(action + strlen("\"action\":"), NULL, 10));
    }
    printf("]}\n");
}

int main(int count, char **words) {
    if (count < 4) {
        fprintf(stderr, "usage: %s HOST PORT EPISODES [TOKEN]\n", words[0]);
        return 2;
    }
    host = words[1], port = words[2];
    if (count > 4) token = words[4];
    char id[33], answer[LARGEST] = "";
    random_hex(client, 32);
    random_hex(id, 16);
    snprintf(session, sizeof session, "/v1/sessions/c-%s", id);
    ask("PUT", session, "{}", answer);
    for (int number = 0; number < atoi(words[3]); number++) play(number);
    ask("DELETE", session, "", answer);
    return 0;
}
