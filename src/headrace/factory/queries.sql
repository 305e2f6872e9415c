-- Queries over the fleet's store, for its page and `factory usage`.

-- [deltas] Growth of a histogram's sum and count between scrapes, by service
WITH told AS (
    SELECT ts, service, name, labels, value, value - lag(value) OVER (
        PARTITION BY service, name, labels ORDER BY ts) AS grown
    FROM metrics WHERE name IN (?, ?))
SELECT service, ts,
    sum(CASE WHEN name = ? THEN grown_or_new(grown, value) END) AS seconds,
    sum(CASE WHEN name = ? THEN grown_or_new(grown, value) END) AS count
FROM told WHERE grown IS NOT NULL GROUP BY ALL ORDER BY ts

-- [services] Exchanges and errors by service
SELECT service, count(*) FILTER (status IS NOT NULL) AS exchanges,
    count(*) FILTER (status >= 500) AS failed,
    quantile_cont(seconds, 0.5) FILTER (status < 400) AS median,
    quantile_cont(seconds, 0.95) FILTER (status < 400) AS tail,
    count(*) FILTER (level IN ('error', 'critical')) AS errors, max(ts) AS last
FROM logs GROUP BY service ORDER BY service

-- [latest] What the profiles in service are
SELECT service, name, arg_max(labels, ts), arg_max(value, ts) FROM metrics
WHERE name IN ('headrace_certified_share', 'headrace_profile_info') GROUP BY ALL

-- [usage] Tokens by key and model; a line with tokens is a request that did work
SELECT coalesce(fields ->> 'key', '–'), coalesce(fields ->> 'model', '–'), count(*)::BIGINT,
       coalesce(sum(TRY_CAST(fields ->> 'prompt_tokens' AS INTEGER)), 0)::BIGINT,
       coalesce(sum(TRY_CAST(fields ->> 'cached_tokens' AS INTEGER)), 0)::BIGINT,
       coalesce(sum(TRY_CAST(fields ->> 'completion_tokens' AS INTEGER)), 0)::BIGINT
FROM (
    SELECT ts, service, fields::JSON AS fields FROM logs
    WHERE message = 'exchange' AND fields IS NOT NULL
)
WHERE fields ->> 'prompt_tokens' IS NOT NULL AND ts >= make_timestamp($since)
      AND ($key IS NULL OR fields ->> 'key' = $key)
      AND ($service IS NULL OR service = $service)
GROUP BY 1, 2 ORDER BY 1, 2

-- [failures] Failed requests by kind, the most frequent first
SELECT status, coalesce(fields ->> 'error', '–'), coalesce(fields ->> 'param', '–'),
       coalesce(path, '–'), coalesce(fields ->> 'key', '–'), count(*)::BIGINT,
       strftime(max(ts), '%Y-%m-%d %H:%M:%S')
FROM (
    SELECT ts, service, status, path, coalesce(fields, '{}')::JSON AS fields FROM logs
    WHERE message = 'exchange' AND status >= 400
)
WHERE ts >= make_timestamp($since)
      AND ($key IS NULL OR fields ->> 'key' = $key)
      AND ($service IS NULL OR service = $service)
GROUP BY 1, 2, 3, 4, 5 ORDER BY 6 DESC, 7 DESC, 1, 2, 3, 4, 5 LIMIT 200

-- [errors] Share of failed exchanges by minute
SELECT service, date_trunc('minute', ts) AS minute, 100.0 * count(*) FILTER (status >= 500) / count(*)
FROM logs WHERE status IS NOT NULL GROUP BY ALL ORDER BY minute

-- [builds] Stages of each cell's last build
SELECT cell, profile, rings, list(stage ORDER BY stage) FILTER (outcome = 'passed'),
    list(stage || ': ' || reason ORDER BY stage) FILTER (outcome = 'failed'),
    list(stage || ': ' || reason ORDER BY stage) FILTER (outcome = 'not evaluated')
FROM (SELECT *, max(ts) OVER (PARTITION BY cell) AS newest FROM builds)
WHERE ts = newest GROUP BY cell, profile, rings ORDER BY cell

-- [alarms] Changes that a re-run judged
SELECT ts, what, metric, before, after, change, chance, confirmed FROM alarms
ORDER BY ts DESC

-- [runs] Runs of each series
SELECT what, count(*), max(ts), arg_max(metrics, ts) FROM runs WHERE valid
GROUP BY what ORDER BY what
