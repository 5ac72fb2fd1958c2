-- Compare some records and, if all hold, write others: the one operation of a store.
-- {schema} is the quoted name of the schema that schema.sql made.

-- Seconds since 1970. A server's clock can be set, so nobody takes it alone: see "time" below.
CREATE OR REPLACE FUNCTION {schema}.clock() RETURNS double precision
LANGUAGE sql VOLATILE
AS $$ SELECT extract(epoch FROM pg_catalog.clock_timestamp())::double precision $$;

-- The number of a key's lock. Two keys may share one: they then wait for each other, no more.
CREATE OR REPLACE FUNCTION {schema}.lock_of(key text) RETURNS bigint
LANGUAGE sql STABLE
AS $$ SELECT pg_catalog.hashtextextended(key, '{schema}.records'::regclass::oid::bigint) $$;

-- The number of the lock that says "somebody waits for this key": held, shared and for a session,
-- by whoever watches it, and so gone with him.
CREATE OR REPLACE FUNCTION {schema}.watch_of(key text) RETURNS bigint
LANGUAGE sql STABLE
AS $$ SELECT pg_catalog.hashtextextended(key, -('{schema}.records'::regclass::oid::bigint)) $$;

-- A batch of changes, each all or nothing, in the given order, as one transaction.
--
-- Locks    Every key that is named is locked first, absent ones too: shared where it is only
--          compared, alone where it may be written, in the order of the keys and so without
--          deadlock. They are advisory locks of the transaction: a refused change leaves nothing,
--          not even in the log. Each statement after that sees what those before committed, which
--          is why the isolation must be READ COMMITTED.
-- Time     One instant for each change, after its locks are held: this server's clock, but never
--          before `earliest` (what the caller knows to have passed), nor before the `at` of any
--          record that the change names.
-- Again    Asked again, since the first answer got lost, a change that is found to be written
--          already (a record it puts bears its writer's number) is answered as applied.
-- Waiters  A key that somebody watches is told to those who listen, and no other.
-- Standbys An answer that shows what others wrote must not be ahead of the synchronous standbys:
--          where nothing is written, a mark in the log makes the commit wait for them all the same.
--
-- `l_key` are all keys, each once, in their order (as bytes); `l_write`: whether it may be written.
-- The change number n names the keys e_from[n] .. e_from[n + 1] - 1 (what is expected of them;
-- NULL: anything; version 0: absent) and puts p_from[n] .. p_from[n + 1] - 1, no key twice.
-- A put's `stamp_of` is the key of an earlier put of its change, whose new version is copied.
-- An array may be NULL where all of it is.
-- `flags`: 1 bump the version, 2 only if the stamp is higher, 4 delete, 8 leave a floor behind.
--
-- Answers one row for each change (`key` NULL: whether it was applied, and its instant), and after
-- it one for each record: applied, what each put left but for what the caller gave himself
-- (`version` NULL: nothing); refused, what stands under the keys.
CREATE OR REPLACE FUNCTION {schema}.swap(
    earliest double precision, patience_ms integer, again boolean, writers bigint[],
    l_key text[], l_write boolean[],
    e_from integer[], e_key text[], e_version bigint[], e_tag text[], e_stamp bigint[],
    p_from integer[], p_key text[], p_tag text[], p_stamp bigint[], p_stamp_of text[],
    p_label text[], p_body bytea[], p_seconds double precision[], p_flags integer[]
) RETURNS TABLE (
    change integer, applied boolean, now double precision, key text, version bigint, tag text,
    stamp bigint, at double precision, label text, body bytea, expires_at double precision
)
LANGUAGE plpgsql VOLATILE
AS $$
#variable_conflict use_column
DECLARE
    first integer;
    last integer;
    latest double precision;
    standing text[];
    holds boolean;
    ended boolean;
    stood boolean;
    wrote boolean := false;
    floor bigint;
    new_stamp bigint;
    source_key text;
    source_version bigint;
    the_key text;
    flags integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE 'transaction_isolation is %, read committed is needed',
            current_setting('transaction_isolation') USING ERRCODE = 'EF001';
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        RAISE 'synchronous_commit is off' USING ERRCODE = 'EF001';
    END IF;

    -- Trying first costs no statement of its own; whoever is not alone stands in line.
    PERFORM set_config('lock_timeout', patience_ms::text, true);
    FOR l IN 1 .. cardinality(l_key) LOOP
        IF l_write[l] THEN
            IF NOT pg_try_advisory_xact_lock({schema}.lock_of(l_key[l])) THEN
                PERFORM pg_advisory_xact_lock({schema}.lock_of(l_key[l]));
            END IF;
        ELSIF NOT pg_try_advisory_xact_lock_shared({schema}.lock_of(l_key[l])) THEN
            PERFORM pg_advisory_xact_lock_shared({schema}.lock_of(l_key[l]));
        END IF;
    END LOOP;
    now := greatest({schema}.clock(), earliest);

    FOR n IN 1 .. cardinality(writers) LOOP
        first := e_from[n];
        last := e_from[n + 1] - 1;
        change := n;
        key := NULL;
        version := NULL; tag := NULL; stamp := NULL; at := NULL; label := NULL; body := NULL;
        expires_at := NULL;

        LOOP
            SELECT max(r.at), array_agg(r.key), bool_or(r.expires_at <= now),
                   bool_and(CASE WHEN r.expires_at > now
                            THEN coalesce(e.version = r.version, true)
                                 AND coalesce(e.tag = r.tag, true)
                                 AND coalesce(e.stamp = r.stamp, true)
                            ELSE coalesce(e.version, 0) = 0 AND e.tag IS NULL AND e.stamp IS NULL
                            END)
            INTO latest, standing, ended, holds
            FROM unnest(e_key[first:last], e_version[first:last], e_tag[first:last],
                        e_stamp[first:last]) AS e (key, version, tag, stamp)
            LEFT JOIN {schema}.records r ON r.key = e.key;
            EXIT WHEN latest IS NULL OR latest <= now;
            now := latest;  -- the clock was set back since: look with that time
        END LOOP;
        holds := coalesce(holds, true);

        IF again AND EXISTS (
            SELECT FROM {schema}.records r
            WHERE r.key = ANY (p_key[p_from[n]:p_from[n + 1] - 1]) AND r.writer = writers[n]
        ) THEN
            applied := true;
            RETURN NEXT;
            RETURN QUERY
            SELECT n, true, now, k.key, r.version, r.tag, r.stamp, r.at, r.label, r.body,
                   r.expires_at
            FROM unnest(p_key[p_from[n]:p_from[n + 1] - 1]) AS k (key)
            LEFT JOIN {schema}.records r ON r.key = k.key AND r.expires_at > now;
            CONTINUE;
        END IF;

        IF NOT holds THEN
            applied := false;
            RETURN NEXT;
            RETURN QUERY
            SELECT n, false, now, r.key, r.version, r.tag, r.stamp, r.at, r.label, r.body,
                   r.expires_at
            FROM {schema}.records r
            WHERE r.key = ANY (e_key[first:last]) AND r.expires_at > now;
            CONTINUE;
        END IF;

        applied := true;
        RETURN NEXT;
        IF ended THEN
            WITH gone AS (
                DELETE FROM {schema}.records r
                WHERE r.key = ANY (e_key[first:last]) AND r.expires_at <= now
                RETURNING r.key
            )
            SELECT array_agg(k) INTO standing
            FROM unnest(standing) AS k WHERE k NOT IN (SELECT gone.key FROM gone);
        END IF;
        source_key := NULL;
        FOR p IN p_from[n] .. p_from[n + 1] - 1 LOOP
            the_key := p_key[p];
            flags := p_flags[p];
            stood := coalesce(the_key = ANY (standing), false);
            new_stamp := p_stamp[p];
            IF p_stamp_of[p] IS NOT NULL THEN
                IF source_key IS DISTINCT FROM p_stamp_of[p] THEN
                    SELECT r.version INTO source_version FROM {schema}.records r
                    WHERE r.key = p_stamp_of[p];
                END IF;
                new_stamp := source_version;
            END IF;

            key := the_key;
            version := NULL; tag := NULL; stamp := NULL; at := NULL; label := NULL; body := NULL;
            expires_at := NULL;
            IF flags & 4 <> 0 THEN
                IF stood THEN
                    DELETE FROM {schema}.records r
                    WHERE r.key = the_key AND (flags & 2 = 0 OR coalesce(new_stamp, 0) > r.stamp)
                    RETURNING r.version INTO source_version;
                    CONTINUE WHEN NOT FOUND;
                    source_key := NULL;
                    wrote := true;
                    IF flags & 8 <> 0 THEN
                        UPDATE {schema}.meta m SET floor = greatest(m.floor, source_version)
                        RETURNING m.floor INTO floor;
                    END IF;
                END IF;
            ELSIF stood THEN
                UPDATE {schema}.records r SET
                    version = r.version + (flags & 1),
                    tag = coalesce(p_tag[p], r.tag),
                    stamp = coalesce(new_stamp, r.stamp),
                    at = now,
                    label = coalesce(p_label[p], r.label),
                    body = coalesce(p_body[p], r.body),
                    expires_at = coalesce(now + p_seconds[p], r.expires_at),
                    writer = writers[n]
                WHERE r.key = the_key AND (flags & 2 = 0 OR coalesce(new_stamp, 0) > r.stamp)
                RETURNING r.version,
                    CASE WHEN p_tag[p] IS NULL THEN r.tag END, r.stamp,
                    CASE WHEN p_label[p] IS NULL THEN r.label END,
                    CASE WHEN p_body[p] IS NULL THEN r.body END, r.expires_at
                INTO version, tag, stamp, label, body, expires_at;
                CONTINUE WHEN NOT FOUND;
                at := now;
                source_key := the_key;
                source_version := version;
                wrote := true;
            ELSE
                IF floor IS NULL THEN
                    SELECT m.floor INTO floor FROM {schema}.meta m;
                END IF;
                version := floor + 1;
                stamp := coalesce(new_stamp, 0);
                at := now;
                expires_at := coalesce(now + p_seconds[p], 'Infinity');
                INSERT INTO {schema}.records
                    (key, version, tag, stamp, at, label, body, expires_at, writer)
                VALUES (the_key, version, coalesce(p_tag[p], ''), stamp, at,
                        coalesce(p_label[p], ''), coalesce(p_body[p], ''), expires_at, writers[n]);
                source_key := the_key;
                source_version := version;
                wrote := true;
            END IF;
            RETURN NEXT;
            IF NOT pg_try_advisory_xact_lock({schema}.watch_of(the_key)) THEN
                PERFORM pg_notify({channel}, {schema}.watch_of(the_key)::text);
            END IF;
        END LOOP;
    END LOOP;

    IF NOT wrote AND current_setting('synchronous_standby_names') <> '' THEN
        PERFORM pg_logical_emit_message(true, 'effectfence', '');
    END IF;
END
$$;

-- Forget up to `at_most` records that have ended; how many went. What is in use is left for the
-- next time.
CREATE OR REPLACE FUNCTION {schema}.purge(earliest double precision, at_most integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    instant double precision := greatest({schema}.clock(), earliest);
    keys text[];
    went integer;
BEGIN
    SELECT array_agg(k.key) INTO keys
    FROM (
        SELECT r.key FROM {schema}.records r
        WHERE r.expires_at <= instant AND r.expires_at < 'Infinity'::double precision
        ORDER BY r.expires_at LIMIT at_most
    ) AS k
    WHERE pg_try_advisory_xact_lock({schema}.lock_of(k.key));
    DELETE FROM {schema}.records r WHERE r.key = ANY (keys) AND r.expires_at <= instant;
    GET DIAGNOSTICS went = ROW_COUNT;
    RETURN went;
END
$$;

UPDATE {schema}.meta SET version = 2 WHERE version < 2;
