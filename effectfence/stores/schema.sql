-- The tables of a store, in a schema of their own. {schema} is that schema's quoted name.
-- Nothing here, and nothing in swap.sql, knows what the records are about.

CREATE SCHEMA IF NOT EXISTS {schema};

-- One row: which version of these definitions stands here, whose ledger it is, and above which
-- number the versions of new records start.
CREATE TABLE {schema}.meta (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    epoch   text NOT NULL CHECK (epoch ~ '^[0-9a-f]{32}$'),
    floor   bigint NOT NULL DEFAULT 0,
    made    timestamptz NOT NULL DEFAULT clock_timestamp()
);

INSERT INTO {schema}.meta (version, epoch)
SELECT 1, md5(concat_ws('/', random(), random(), random(), clock_timestamp(), pg_backend_pid(),
                        (SELECT oid FROM pg_namespace WHERE nspname = {schema_text})));

CREATE TABLE {schema}.records (
    key        text COLLATE "C" PRIMARY KEY,
    version    bigint NOT NULL,
    tag        text NOT NULL,
    stamp      bigint NOT NULL,
    at         double precision NOT NULL,  -- seconds since 1970, by this server's clock
    label      text COLLATE "C" NOT NULL,
    body       bytea NOT NULL,
    expires_at double precision NOT NULL,  -- 'Infinity': stays
    writer     bigint NOT NULL             -- of the last put: who asks again knows his own by it
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);

-- What is listed, in the order in which pages of it are read.
CREATE INDEX records_by_label ON {schema}.records (label, key);

-- What goes one day, in the order in which it goes.
CREATE INDEX records_by_end ON {schema}.records (expires_at)
    WHERE expires_at < 'Infinity'::double precision;
