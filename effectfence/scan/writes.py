"""Which call from the package changes the world, of what kind, and what a second one does.

Tables first; `classify` goes through the kinds in their order and takes the first that speaks.

1. A call is a write only for what it says itself (its verb, its statement, its command), never for
   words of its neighbours.
2. Where a call could be read either way, the receiver decides: a client is written to, a list is
   only filled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from effectfence.scan.commands_run import Command, command
from effectfence.scan.model import Repeats
from effectfence.scan.statements import statement
from effectfence.scan.tables import table
from effectfence.scan.values import Const, Rec, Seq, Sym, Text, Value, alternatives, texts
from effectfence.scan.words import meaning, words

if TYPE_CHECKING:
    from effectfence.scan.machine import Call

VERBS: Final[dict[str, Repeats]] = {
    "POST": "effect",
    "PUT": "same",
    "PATCH": "same",
    "DELETE": "same",
}
_READ_VERBS: Final = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))
_HTTP_METHODS: Final[dict[str, str]] = {
    "post": "POST",
    "put": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
    "del": "DELETE",
    "postForm": "POST",
    "putForm": "PUT",
    "patchForm": "PATCH",
    "post_json": "POST",
}
_REQUESTERS: Final = table(
    """request fetch send urlopen Request stream api call axios got ky needle default $fetch ofetch
    fetchWithTimeout raw requestJson build_request superagent paginate rest"""
)
_HTTP: Final = table(
    """requests httpx aiohttp urllib3 urllib axios got node-fetch undici ky superagent needle
    cross-fetch isomorphic-fetch ofetch http https requests_oauthlib niquests curl_cffi
    node-fetch-native treq phin @octokit/rest octokit @octokit/core @octokit/request
    requests_toolbelt cloudscraper fetch-retry"""
)
_SQL: Final = table(
    """sqlite3 aiosqlite psycopg psycopg2 asyncpg pymysql aiomysql mysql mysql2 pg postgres
    better-sqlite3 sqlite knex sqlalchemy neo4j neo4j-driver duckdb snowflake clickhouse_connect
    clickhouse_driver mssql pyodbc oracledb @clickhouse/client sql.js @libsql/client
    libsql_client @neondatabase/serverless pymssql databases peewee prisma @prisma/client
    drizzle-orm typeorm sequelize trino databricks cassandra mariadb"""
)
_MAIL: Final = table(
    """nodemailer smtplib aiosmtplib imaplib imap imapflow emailjs yagmail imap_tools aioimaplib
    node-imap"""
)
_KEY_VALUE: Final = table(
    """redis ioredis memcached pymemcache memjs valkey aioredis etcd3 @upstash/redis upstash_redis
    coredis plyvel lmdb diskcache @vercel/kv keyv iovalkey glide @redis/client"""
)
_QUEUE: Final = table(
    """pika aio_pika kafka aiokafka confluent_kafka kafkajs amqplib bullmq bull celery rq nats
    nats.ws mqtt paho @aws-sdk/client-sqs @aws-sdk/client-sns zmq zeromq @google-cloud/pubsub
    arq dramatiq @azure/service-bus google.cloud.pubsub_v1 amqp-connection-manager"""
)
_PURE: Final = table(
    """zod json re math datetime logging path url util crypto typing pydantic yaml uuid base64
    hashlib dotenv chalk winston pino collections itertools functools time random string mcp
    fastmcp @modelcontextprotocol zod-to-json-schema textwrap inspect dataclasses enum abc
    contextlib contextvars copy decimal fractions html io locale operator platform pprint
    secrets statistics struct sys threading traceback types unicodedata urllib.parse warnings
    weakref zoneinfo argparse click typer rich loguru structlog tabulate numpy pandas jsonschema
    attr attrs orjson markdownify bs4 lxml readabilipy protego buffer events querystring
    string_decoder timers assert lodash moment dayjs date-fns luxon yargs commander ajv debug
    semver mime-types markdown-it marked cheerio jsdom turndown minimatch glob diff dateutil
    pytz anyio starlette uvicorn fastapi express cors hono xml csv difflib importlib pkgutil
    signal atexit gc ast async_hooks perf_hooks worker_threads readline stream zlib tty v8 vm
    form-data qs ms jsonwebtoken jose PIL sharp tiktoken email mimetypes mailparser graphlib
    heapq bisect array queue concurrent multiprocessing p-limit p-queue p-map cachetools
    tenacity backoff pydantic_settings environs humanize jinja2 jmespath ora inquirer prompts
    figlet boxen nanoid ulid slugify fuse.js fuzzywuzzy rapidfuzz typing_extensions __future__
    gql-tag graphql-tag graphql google_auth_oauthlib google_auth_httplib2 msal keyring
    opentelemetry @opentelemetry sentry_sdk @sentry posthog prometheus_client @toon-format
    zod-validation-error lru-cache node-cache html-to-text he entities js-yaml toml ini
    csv-parse fast-xml-parser xml2js ws_types eth_utils eth_account_types bignumber.js bn.js
    bs58 tweetnacl"""
)
"""Modules that change nothing outside the process (or only logs and measurements)."""

_FILE: Final[dict[str, Repeats]] = {
    **dict.fromkeys(
        table(
            """writeFile writeFileSync write_text write_bytes mkdir mkdirSync makedirs mkdirp unlink
        unlinkSync rmSync rmdir rmdirSync rmtree removedirs rename renameSync copyFile
        copyFileSync copyfile copytree copy2 createWriteStream symlink symlinkSync truncate
        chmod chown utimes outputFile outputJson writeJson ensureDir emptyDir moveFile touch
        extractall symlink_to hardlink_to cp cpSync rm savefig to_csv to_excel to_parquet
        ensureDirSync writeJSON writeFileAtomic trashItem"""
        ),
        "same",
    ),
    "appendFile": "effect",
    "appendFileSync": "effect",
    "mkdtemp": "effect",
}
_FILE_MODULES: Final = table(
    """fs fs-extra os shutil pathlib aiofiles graceful-fs rimraf trash send2trash aiofiles.os del
    mkdirp write-file-atomic memfs anyio.Path tempfile fsspec zipfile tarfile"""
)
_OS_WRITES: Final = table(
    """remove rename replace move copy link unlink mkdir makedirs rmdir removedirs symlink truncate
    rmtree copyfile copytree copy2 chmod chown write writev make_archive unpack_archive
    send2trash rimraf trash del mkdirp writeFileAtomic"""
)
_UNMISTAKABLE_FILE: Final = table(
    """writeFile writeFileSync write_text write_bytes appendFile appendFileSync createWriteStream
    unlinkSync rmtree copyFile mkdirSync rmSync renameSync symlink_to copytree outputFile
    writeJson"""
)
_PROCESS: Final = table(
    """exec execSync execFile execFileSync spawn spawnSync fork run Popen call check_call
    check_output create_subprocess_exec create_subprocess_shell system popen execa execaSync
    execaCommand getoutput getstatusoutput $ run_process open_process execAsync execFileAsync
    command startfile x"""
)
_PROCESS_MODULES: Final = table(
    """child_process subprocess execa asyncio os shelljs zx anyio sh cross-spawn pexpect plumbum
    tinyexec node-pty trio"""
)
_REDIS: Final[dict[str, Repeats]] = {
    **dict.fromkeys(
        table(
            """lpush rpush lpop rpop lrem xadd publish incr incrby incrbyfloat decr decrby hincrby
        append zincrby spop blpop brpop rpoplpush lmove zpopmin zpopmax linsert xreadgroup
        xclaim xautoclaim eval evalsha getdel fcall execute_command lPush rPush lPop rPop xAdd
        incrBy hIncrBy sPop xReadGroup lpushx rpushx spublish lRem"""
        ),
        "effect",
    ),
    **dict.fromkeys(
        table(
            """set mset setex psetex setnx hset hmset hdel hsetnx sadd srem zadd zrem delete del
        unlink expire expireat pexpire persist rename renamenx flushall flushdb ltrim lset xdel xack
        xtrim xgroup_create xgroup_destroy json_set pfadd geoadd setbit setrange copy move
        restore create_index dropindex hSet sAdd sRem zAdd zRem setEx setNX hDel xDel xAck
        xGroupCreate xgroup xGroupDestroy pExpire mSet zremrangebyscore merge mset_json hexpire
        getset getex put jset sdiffstore sinterstore sunionstore script_load config_set jsonset
        dropindex alter_schema_add"""
        ),
        "same",
    ),
}
_CLIENT_WORDS: Final = table(
    """client api db database session conn connection redis sdk service services repo repository
    cursor collection collections table tables bucket queue topic channel docker containers
    images volumes networks kube k8s github octokit slack twilio stripe gitlab jira notion
    linear bot resend mailer transporter transport smtp imap producer publisher pool engine tx
    transaction driver store storage wallet exchange broker drive calendar gmail sheets sheet
    workbook users messages drafts events files permissions memory graph index vector ledger
    backend provider s3 sqs sns dynamodb lambda firestore mongo mongodb supabase prisma knex
    model models contract device devices page browser context_manager repos issues pulls
    projects project tasks task board card cards boards lists manager controller adapter gateway
    mailbox http axios instance rest customers invoices orders payments conversations chat
    reactions pipe"""
)
_DATA_WORDS: Final = table(
    """json text split data headers header body keys values params searchparams result results
    content args arguments options opts match group groups matches lines parts errors error
    response res resp payload query querystring form formdata parse parsed metadata meta env
    environ process console logger log logging url dom document window cache buffer stdout
    stderr stdin stream seen visited pending cookies config settings state progress logs argv
    props attributes style map set dict list array attrs fields_list output z schema"""
)
_CONTEXT_ONLY: Final = table(
    """report_progress reportprogress info debug warning error log send_log_message
    sendloggingmessage sendnotification send_notification notification elicit elicitinput
    createmessage create_message sample read_resource send_resource_updated set_state
    sendtoollistchanged sendresourcelistchanged sendpromptlistchanged notify_tools_changed
    send_tool_list_changed send_progress_notification sendprogress setlevel oninitialized
    sendresourceupdated addlistener removelistener once emit on off send_ping"""
)
"""What a handler says to the client that called it: no effect on the world."""

_AMBIGUOUS: Final = table(
    """add append set push pop update remove insert clear put write start stop run execute open
    close replace reset move merge end commit apply call join record log request text message
    issue place release order post link mark text new build quote share store sync connect
    disconnect scale restart end register generate import forward tag pull star subscribe
    unsubscribe schedule change email complete finish import resolve save submit block drop
    delete kill move void emit empty test trigger toggle tip lock unlock expire settle invoke
    dispatch"""
)
"""Verbs that local things know too: only a client's are writes."""

_LOCAL_CALLS: Final = table(
    """createhash createhmac createobject createelement createrequire createreadstream createserver
    createinterface createtransport createclient createpool createconnection create_engine
    create_async_engine createasynciterator createcipheriv createdecipheriv createsign
    createverify create_task create_future create_initialization_options
    createinitializationoptions create_default_context create_client createparser
    create_connection create_pool createproxy registertool register_tool registerresource
    registerprompt setrequesthandler setnotificationhandler addeventlistener removeeventlistener
    add_argument add_parser setheader set_cookie addtool add_tool addresource addprompt
    registercapabilities createcontext create_model createtypedelement createtextnode settimeout
    setinterval cleartimeout clearinterval create_error createerror creategithuberror
    raise_for_status setprototypeof set_event_loop run_until_complete new_event_loop
    add_middleware addmiddleware run_forever postmessage setpriority add_done_callback
    add_signal_handler set_result set_exception setencoding set_defaults start_new_session
    createtable_ message_from_bytes appendchild generate_uuid generateuuid generate_id
    generateid generatekeypairsync generatetext generate_content generateobject create_embedding
    createembedding createsession_ createlogger create_logger set_level settoken set_token
    setauth set_auth authorize authenticate create_message_ buildurl build_url execute_query_
    launchpersistentcontext addinitscript writehead write_message build_opener install_opener
    createagent createrequestlistener add_field addfield add_row addrow add_column add_section
    add_subparsers generate_sql record_exception set_attribute set_status start_as_current_span
    start_span setattribute setstatus startspan startactivespan recordexception end_span join
    replace text log close connect disconnect replaceall tolowercase sort run_local_server
    from_client_secrets_file run_in_executor settimezone setdefault setprototypeof set_option
    setlocale"""
)


@dataclass(slots=True)
class Written:
    """What a call was found to do."""

    kind: str
    what: str
    repeats: Repeats
    because: str
    library: str = ""
    verb: str = ""


def module_of(sym: Sym) -> str:
    """The outside package that something comes from, `node:` and subpath removed."""
    if sym.root != "module" or not sym.path:
        return ""
    name = sym.path[0].removeprefix("node:")
    if name.startswith("@"):
        return "/".join(name.split("/")[:2])
    return name.split("/")[0]


def is_pure(sym: Sym) -> bool:
    name = module_of(sym)
    if not name:
        return False
    first = name.split("/")[0] if name.startswith("@") else name.split(".")[0]
    if name == "urllib" or name == "asyncio" or name == "os":
        return False
    dotted = ".".join(sym.path[:2])
    if dotted.startswith(("google.auth", "urllib.parse", "concurrent.futures")):
        return True
    return name in _PURE or first in _PURE


def classify(call: Call) -> Written | None:
    """What a call that leaves the package changes, if anything."""
    sym = call.callee
    if sym.root == "tool":
        return None
    for kind in (_http, _process, _sql, _file, _mail, _key_value, _sdk):
        found = kind(call, sym)
        if found is not None:
            return found if found.kind != "read" else None
    return None


_READ: Final = Written("read", "", "same", "")


def _library(sym: Sym, default: str = "") -> str:
    return module_of(sym) or default


def _chain(sym: Sym) -> tuple[str, ...]:
    """The receiver's names, without calls and indices."""
    return tuple(part for part in sym.path[:-1] if part not in ("()", "[]"))


# --- HTTP -----------------------------------------------------------------------------------------


def _http(call: Call, sym: Sym) -> Written | None:
    name = call.name
    module = module_of(sym)
    if module and is_pure(sym):
        return None
    if name in ("Request",) and call.new is False and module != "urllib":
        return None
    mutation = _mutation(call) if sym.root not in ("global", "input") else ""
    if mutation:
        return Written(
            "http", mutation, "effect", "a mutation is made at each call", module, "POST"
        )
    given = _verbs_given(call)
    if given and (name in _REQUESTERS or module in _HTTP or _url_in(call) or _asks(name)):
        return _http_write(call, given, sym)
    if name in _HTTP_METHODS and (module in _HTTP or _url_in(call) or _http_receiver(sym)):
        if sym.root == "global" and sym.path[0] not in ("axios", "got", "ky", "$"):
            return None
        verb = _HTTP_METHODS[name]
        if not call.args and not call.named and not _http_receiver(sym):
            return None
        return _http_write(call, [verb], sym)
    if name in ("urlopen", "Request") and module == "urllib":
        body = call.named.get("data") or (call.args[1] if len(call.args) > 1 else None)
        method = texts(call.named.get("method"))
        if method or (body is not None and body != Const(None)):
            return _http_write(call, [m.upper() for m in method] or ["POST"], sym)
        return _READ
    if module in _HTTP and name in ("get", "head", "options", "Session", "AsyncClient", "Client"):
        return _READ
    return None


def _asks(name: str) -> bool:
    parts = words(name)
    return bool(parts) and any(
        part in ("request", "fetch", "api", "call", "http", "rest", "req") for part in parts
    )


def _verbs_given(call: Call) -> list[str]:
    """The HTTP verbs that a call's own arguments name."""
    found: list[str] = []
    named = call.named.get("method") or call.named.get("http_method") or call.named.get("verb")
    found += [text.upper() for text in texts(named)]
    for at, arg in enumerate(call.args[:3]):
        for one in alternatives(arg):
            if isinstance(one, Rec):
                found += [text.upper() for text in texts(one.fields.get("method"))]
            elif at < 2 and isinstance(one, Const | Text):
                text = texts(one)
                first = text[0].split(" ")[0] if text else ""
                if first.isupper() and (first in VERBS or first in _READ_VERBS):
                    found.append(first)
                elif (
                    text
                    and text[0] in ("post", "put", "patch", "delete")
                    and (call.name in _REQUESTERS or _asks(call.name))
                ):
                    found.append(text[0].upper())
    return [verb for verb in found if verb in VERBS or verb in _READ_VERBS]


def _url(call: Call) -> str:
    """The URL or path that a call names, as far as it is known."""
    candidates: list[Value] = [*call.args[:2]]
    candidates += [call.named[name] for name in ("url", "path", "endpoint") if name in call.named]
    for arg in call.args[:2]:
        for one in alternatives(arg):
            if isinstance(one, Rec):
                candidates += [
                    one.fields[name]
                    for name in ("url", "path", "endpoint", "uri", "pathname")
                    if name in one.fields
                ]
    for value in candidates:
        for text in texts(value):
            bare = text.split(" ", 1)[-1] if text.split(" ")[0] in VERBS else text
            if "/" in bare or bare.startswith("http"):
                return bare
    return ""


def _url_in(call: Call) -> bool:
    url = _url(call)
    return bool(url) and (url.startswith(("/", "http", "{}")) or "/" in url) and " " not in url


def _http_receiver(sym: Sym) -> bool:
    chain = {word for part in _chain(sym) for word in words(part)}
    return bool(chain & {"client", "session", "http", "axios", "api", "requests", "httpx", "rest"})


ASKS: Final = "POST that asks"
"""A `POST` by whose path one would think it a question; the tool's name has the last word."""
_ASKING_PATHS: Final = re.compile(
    r"(?:^|[/_.:-])(?:search|query|_search|_msearch|_count|lookup|find|filter|list|batch_?get|"
    r"preview|validate|estimate|simulate|quote|calculate|suggest|autocomplete|embeddings?|"
    r"chat/completions|completions|rerank|translate|jql|aggregate|runquery|generatecontent|"
    r"evaluate|distances?|parse|detect|analy[sz]e|count|info|describe|read|get|(?:reverse_?)?geocod(?:e|ing))(?:[/?#:]|$)",
    re.I,
)
_LETTING_IN: Final = re.compile(
    r"(?:^|[/_.:-])(?:oauth2?|tokens?|login|auth|authenticate|authorize|introspect)(?:[/?#:]|$)|"
    r"/oauth2?/|/search/",
    re.I,
)


def _http_write(call: Call, verbs: list[str], sym: Sym) -> Written:
    writing = [verb for verb in verbs if verb in VERBS]
    if not writing:
        return _READ
    url = _url(call)
    verb = min(writing, key=list(VERBS).index)
    if verb == "POST" and _reads_only(call, url):
        return _READ
    shown = _shown_url(url)
    last = url.split("?")[0].rstrip("/").rsplit("/", 1)[-1] if url else ""
    asks = verb == "POST" and bool(last) and bool(_ASKING_PATHS.search(f"/{last}"))
    return Written(
        "http",
        f"{verb} {shown}".strip(),
        VERBS[verb],
        f"{verb} {_BECAUSE[verb]}",
        _library(sym),
        ASKS if asks else verb,
    )


_BECAUSE: Final = {
    "POST": "makes something new at each call, unless the service knows the call again",
    "PUT": "puts the same state again",
    "PATCH": "sets the same fields again",
    "DELETE": "deletes what is gone by then",
}


def _reads_only(call: Call, url: str) -> bool:
    """A `POST` that lets in, or whose text is a query."""
    bare = url.split("?")[0].rstrip("/")
    last = bare.rsplit("/", 1)[-1] if bare else ""
    if (last and _LETTING_IN.search(f"/{last}")) or re.search(r"/oauth2?/|rpc/get_", bare):
        return True
    return _graphql_reads(call, url) or _rpc_reads(call)


def _rpc_reads(call: Call) -> bool:
    """A JSON-RPC request whose method's name reads."""
    for value in (*call.args, *call.named.values()):
        for one in alternatives(value):
            if isinstance(one, Rec):
                body = [
                    one,
                    *(
                        p
                        for v in one.fields.values()
                        for p in alternatives(v)
                        if isinstance(p, Rec)
                    ),
                ]
                for record in body:
                    if "jsonrpc" in record.fields:
                        named = texts(record.fields.get("method"))
                        return bool(named) and all(
                            meaning(name) in ("read", None) for name in named
                        )
    return False


def _graphql_reads(call: Call, url: str) -> bool:
    """A GraphQL request whose text is a query."""
    found: list[str] = []
    for value in (*call.args, *call.named.values()):
        for text in _texts_within(value):
            stripped = text.lstrip()
            if stripped.startswith(("query", "mutation", "{ ", "{\n")) and "{" in stripped:
                found.append(stripped)
    return bool(found) and not any(text.startswith("mutation") for text in found)


def _mutation(call: Call) -> str:
    """The GraphQL mutation that a call sends, whatever sends it."""
    for value in (*call.args, *call.named.values()):
        for text in _texts_within(value):
            found = re.match(r"\s*mutation\b\s*(\w*)[^{]*\{\s*(\w+)", text)
            if found is not None:
                return f"mutation {found[1] or found[2]}"
    return ""


def _texts_within(value: Value, depth: int = 3) -> list[str]:
    out: list[str] = []
    for one in alternatives(value):
        out += texts(one)
        if depth and isinstance(one, Rec):
            for part in one.fields.values():
                out += _texts_within(part, depth - 1)
        elif depth and isinstance(one, Seq):
            for part in one.items[:20]:
                out += _texts_within(part, depth - 1)
    return out


def _shown_url(url: str) -> str:
    shown = re.sub(r"^\{\}(?=/)", "", url)
    shown = re.sub(r"\{\}", "…", shown)
    return shown if len(shown) <= 100 else shown[:97] + "…"


# --- processes ------------------------------------------------------------------------------------


def _process(call: Call, sym: Sym) -> Written | None:
    module = module_of(sym)
    name = call.name
    if name in ("terminate", "kill", "killpg", "send_signal") and (
        module in _PROCESS_MODULES
        or module in ("os", "signal", "tree-kill", "psutil")
        or sym.path == ("process", "kill")
    ):
        return Written("process", f"{name}()", "same", "ends what is ended by then", module)
    if name not in _PROCESS or module not in _PROCESS_MODULES:
        return None
    if module == "os" and name not in ("system", "popen", "startfile"):
        return None
    if module in ("asyncio", "anyio") and not ("subprocess" in name or "process" in name):
        return None
    found: Command = command(call)
    if found.reads:
        return _READ
    verb = "given" if found.given else ""
    return Written("process", found.shown, found.repeats, found.because, module, verb)


# --- SQL ------------------------------------------------------------------------------------------


_RUNS_SQL: Final = table(
    """execute executemany executescript query run exec raw prepare fetch fetchrow fetchval
    fetch_all fetch_one all execute_query executeQuery executeWrite execute_write $executeRaw
    $executeRawUnsafe $queryRaw $queryRawUnsafe exec_driver_sql sql unsafe command
    insert_many_sql batch text run_query session_run simpleQuery queryRows read_sql
    read_sql_query executeSql"""
)
_ASKS_DB: Final = frozenset(
    ("execute", "executemany", "executescript", "execute_query", "executeQuery")
)


def _sql(call: Call, sym: Sym) -> Written | None:
    name = call.name
    if name not in _RUNS_SQL or sym.root == "input" or (name == "text" and module_of(sym) == ""):
        return None
    module = module_of(sym)
    given = [
        *call.args[:1],
        *(call.named[k] for k in ("query", "sql", "operation", "statement") if k in call.named),
    ]
    known: list[str] = []
    for value in given:
        known += texts(value)
        for one in alternatives(value):
            if isinstance(one, Rec):
                known += texts(one.fields.get("sql") or one.fields.get("text"))
                known += texts(one.fields.get("query"))
            elif isinstance(one, Sym) and one.path[-1:] == ("()",) and one.path[-2:-1] == ("text",):
                known += [""]
    found = [spoken for text in known if (spoken := statement(text)) is not None]
    if found:
        writing = [one for one in found if not one.reads]
        if not writing:
            return _READ
        chosen = next((w for w in writing if w.repeats == "effect"), writing[0])
        return Written("sql", chosen.shown, chosen.repeats, chosen.because, module, chosen.guard)
    chain = {word for part in _chain(sym) for word in words(part)}
    database = module in _SQL or bool(
        chain & {"cursor", "conn", "connection", "db", "database", "pool", "driver", "engine", "tx"}
    )
    if not database or is_pure(sym) or not given:
        return None
    if name in ("all", "text", "run", "exec", "fetch", "batch", "command") and module not in _SQL:
        return None
    if any(text and text != "{}" for text in known):
        return None
    return Written(
        "sql",
        "a statement it is given",
        "depends",
        "the statement comes from the call",
        module,
        "given",
    )


# --- files ----------------------------------------------------------------------------------------


def _file(call: Call, sym: Sym) -> Written | None:
    name, module = call.name, module_of(sym)
    if name == "open" and (
        sym.root == "global"
        or module in ("io", "aiofiles", "codecs", "fs")
        or _chain(sym)[-1:] == ("Path",)
        or sym.path[-3:-1] == ("Path", "()")
    ):
        return _opened(call, sym)
    if module in _FILE_MODULES and name in (_OS_WRITES | _FILE.keys()):
        if module == "tempfile" or (module == "os" and not call.file.endswith(".py")):
            return None
        direct = "()" not in sym.path[:-1]
        if not direct and (module in ("os", "shutil") or (module == "fs" and name not in _FILE)):
            return None
        return _file_write(call, name, module)
    if module == "pathlib" and name in ("replace", "unlink", "rename", "mkdir", "touch", "rmdir"):
        return _file_write(call, name, module)
    if name in _UNMISTAKABLE_FILE and not (sym.root == "module" and is_pure(sym)):
        return _file_write(call, name, module)
    if module in _FILE_MODULES:
        return _READ
    return None


def _file_write(call: Call, name: str, module: str) -> Written:
    repeats = _FILE.get(name, "same")
    target = next((t for value in call.args[:1] for t in texts(value)), "")
    shown = f"{name}({_short(target)})" if target.strip("{}/") else f"{name}()"
    flags = [
        t
        for v in call.args[1:]
        for o in alternatives(v)
        if isinstance(o, Rec)
        for t in texts(o.fields.get("flag") or o.fields.get("flags"))
    ]
    if any(flag.startswith("a") for flag in flags):
        repeats = "effect"
    why = "appends once more" if repeats == "effect" else "leaves the same files behind"
    return Written("file", shown, repeats, why, module)


def _opened(call: Call, sym: Sym) -> Written | None:
    at = 0 if _chain(sym)[-1:] == ("Path",) else 1
    mode = call.named.get("mode") or (call.args[at] if len(call.args) > at else None)
    modes = texts(mode)
    if not any(letter in text for text in modes for letter in "wax+"):
        return _READ
    appends = any("a" in text for text in modes)
    target = next((t for value in call.args[:1] for t in texts(value)), "")
    shown = f'open({_short(target) or "…"}, "{modes[0]}")'
    why = "appends once more" if appends else "leaves the same file behind"
    return Written("file", shown, "effect" if appends else "same", why, "")


def _short(text: str) -> str:
    text = text.replace("{}", "…")
    return text if len(text) <= 60 else "…" + text[-58:]


# --- mail -----------------------------------------------------------------------------------------

_MAIL_VERBS: Final[dict[str, Repeats]] = {
    "sendMail": "effect",
    "sendmail": "effect",
    "send_message": "effect",
    "append": "effect",
    "copy": "effect",
    "store": "same",
    "expunge": "same",
    "send": "effect",
    "move": "same",
    "delete": "same",
    "uid": "same",
    "addFlags": "same",
    "delFlags": "same",
    "setFlags": "same",
    "messageDelete": "same",
    "messageMove": "same",
    "messageFlagsAdd": "same",
    "addKeywords": "same",
    "messageFlagsRemove": "same",
    "add_flags": "same",
    "remove_flags": "same",
    "create": "same",
    "rename": "same",
}
_IMAP_READS: Final = table("""SEARCH FETCH search fetch THREAD SORT""")


def _mail(call: Call, sym: Sym) -> Written | None:
    name, module = call.name, module_of(sym)
    if name in ("sendMail", "sendmail") and not (module and module not in _MAIL and is_pure(sym)):
        return Written("mail", f"{name}()", "effect", "sends once more", module)
    if module not in _MAIL:
        return None
    verb = _MAIL_VERBS.get(name)
    if name == "uid" and any(t in _IMAP_READS for a in call.args[:1] for t in texts(a)):
        return _READ
    if name == "addFlags" and any("Seen" in t for a in call.args for t in _texts_within(a)):
        return _READ
    if verb is None:
        return None
    why = "sends or files once more" if verb == "effect" else "sets the same state again"
    return Written("mail", f"{name}()", verb, why, module)


# --- key-value ------------------------------------------------------------------------------------


def _key_value(call: Call, sym: Sym) -> Written | None:
    module = module_of(sym)
    chain = {word for part in _chain(sym) for word in words(part)}
    if module not in _KEY_VALUE and not chain & {"redis", "valkey", "kv", "memcached"}:
        return None
    name = call.name
    verb = _REDIS.get(name)
    if name in ("execute_command", "sendCommand", "call"):
        spoken = next((t for a in call.args[:1] for t in texts(a)), "").split(" ")[0].lower()
        verb = _REDIS.get(spoken, "same" if meaning(spoken.rpartition(".")[2]) == "same" else None)
        name = spoken or name
    if verb is None:
        return _READ if meaning(name) in ("read", None) else None
    if name == "set" and _truthy(call.named.get("nx")):
        return Written(
            "key-value", "SET … NX", "same", "set only where it is not yet", module, "nx"
        )
    why = "changes it once more" if verb == "effect" else "leaves the same value behind"
    return Written("key-value", name.upper(), verb, why, module)


def _truthy(value: Value | None) -> bool:
    return isinstance(value, Const) and bool(value.value)


# --- everything with a client ---------------------------------------------------------------------
def _sdk(call: Call, sym: Sym) -> Written | None:
    name = call.name
    if name in ("()", "[]") or not name:
        return None
    lowered = name.lower().replace("_", "") if name.lower() not in _LOCAL_CALLS else name.lower()
    if lowered in _LOCAL_CALLS or name.lower() in _CONTEXT_ONLY or lowered in _CONTEXT_ONLY:
        return None
    module = module_of(sym)
    if module and is_pure(sym):
        return None
    if name in ("execute", "exec", "run", "commit", "go", "do") and sym.path[-2:-1] == ("()",):
        return None  # `service.messages().send(…).execute()`: the verb was spoken before
    command_name = _aws_command(call)
    if (name == "build" and len(_chain(sym)) < 2) or name == "end":
        return None
    if name[:1].isupper() or "retry" in words(name):
        return None  # a class: making an object of it changes nothing yet
    if module in _BROWSERS:
        if name not in _BROWSING:
            return _READ
        why = "what the page does with it is the page's affair"
        return Written("sdk", f"{name}()", "depends", why, module)
    if module in _HTTP and name in ("create", "extend", "instance", "use"):
        return None
    if name in _NOUNS or (name == "initialize" and len(call.args) + len(call.named) < 2):
        return None
    said = meaning(command_name or name)
    if words(name)[0] == "set" and words(name)[-1] in _SETTINGS:
        return None
    if name == "commit" and module in _GIT:
        said = "effect"
    if said in (None, "read"):
        return None
    if not _client(call, sym):
        return None
    parts = _chain(sym)
    shown = ".".join([*[part for part in parts if part != "default"][-3:], name])
    if command_name:
        shown = command_name
    kind = "queue" if module in _QUEUE else "mail" if module in _MAIL else "sdk"
    if kind == "sdk" and module in _KEY_VALUE:
        kind = "key-value"
    again = "does it once more" if said == "effect" else "leaves the same state behind"
    why = f"`{command_name or name}` {again}"
    return Written(kind, f"{shown}()", "effect" if said == "effect" else "same", why, module)


_NOUNS: Final = table(
    """issue order comment message email text log record quote draft book place label mark tag link
    star vote event import lock new request state price stop_reason share call start_time note"""
)
"""`client.issue(key)`: what is asked for, although it could be a verb."""
_SETTINGS: Final = table(
    """token key credentials auth header headers timeout logger level proxy session cookie cookies
    password context option options language locale debug agent secret config mode hook handler
    callback encoding listener interceptor retries url environment scheme"""
)
"""What is set on a client itself, in this process."""
_BROWSERS: Final = table("playwright puppeteer puppeteer-core selenium pyppeteer patchright")
_BROWSING: Final = table(
    """click dblclick fill type press tap check uncheck selectOption select_option setInputFiles
    set_input_files send_keys submit dispatchEvent dispatch_event dragTo drag_to"""
)
_GIT: Final = table("git simple-git isomorphic-git pygit2 dulwich nodegit")


def _aws_command(call: Call) -> str:
    """`client.send(new PutItemCommand(…))`: the verb stands in what is sent."""
    if call.name != "send" or not call.args:
        return ""
    for one in alternatives(call.args[0]):
        if isinstance(one, Sym) and one.path[-1:] == ("()",) and len(one.path) > 1:
            name = one.path[-2]
            if name.endswith("Command"):
                return name.removesuffix("Command")
    return ""


def _client(call: Call, sym: Sym) -> bool:
    """Whether what is called is somebody's client, and not a thing of this process."""
    chain = _chain(sym)
    name = call.name
    ambiguous = name.lower() in _AMBIGUOUS
    if sym.root in ("input", "fresh", "tool"):
        return False
    if sym.root == "global":
        return (
            bool(chain)
            and chain[0].lower() in _CLIENT_WORDS
            and chain[0] not in ("process", "window", "document")
        )
    if sym.root == "context":
        if not {"lifespan_context", "state", "app", "deps", "fastmcp"} & set(chain):
            return False  # what is said to the client that called
        known = {word for part in chain[1:] for word in words(part)}
        return not ambiguous or bool(known & _CLIENT_WORDS)
    data = bool(chain) and chain[-1].lower().replace("_", "") in _DATA_WORDS
    if data and not (sym.root == "module" and len(chain) <= 1):
        return False
    if any(part in ("json", "split", "text") for part in chain[-2:]) and sym.path[-2:-1] == ("()",):
        return False
    if sym.root == "module":
        if not chain:
            return not ambiguous and len(words(name)) > 1
        if chain[0].split(".")[0] in ("os", "asyncio", "sys", "http", "https", "net", "socket"):
            return False
        return not (_reads_then(sym) and ambiguous)
    everywhere = {word for part in chain for word in words(part)}
    if sym.root in ("field", "param"):
        if ambiguous:
            return bool(everywhere & _CLIENT_WORDS) and not _reads_then(sym)
        return bool(chain)
    return not ambiguous and bool(everywhere & _CLIENT_WORDS)


def _reads_then(sym: Sym) -> bool:
    """`client.list_items()[0].update`: what a read gave back, being filled."""
    names = sym.path[:-1]
    for at, part in enumerate(names):
        if part == "()" and at and meaning(names[at - 1]) == "read" and "[]" in names[at:]:
            return True
        if part == "()" and at and names[at - 1] in ("json", "parse", "loads", "items", "dict"):
            return True
    return False
