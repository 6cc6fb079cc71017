"""The look of report.html: one style sheet, light and dark, from 320 px up."""

CSS = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1a2330;--soft:#5a6675;--line:#dde2e9;
--quant:#0b7a75;--float:#7d8ca3;--other:#b9a2d6;--good:#14713a;--goodbg:#e2f4e8;--bad:#b3261e;
--badbg:#fde8e6;--open:#8a5a00;--openbg:#fdf1d8;--zone:#f9d9d6}
@media(prefers-color-scheme:dark){:root{--bg:#11161d;--card:#1a212b;--ink:#e6ebf2;--soft:#9aa7b8;
--line:#303b49;--quant:#3fc1b8;--float:#8ea0ba;--other:#a78bd0;--good:#6fd394;--goodbg:#163524;
--bad:#ff8a80;--badbg:#43201f;--open:#f2bf5e;--openbg:#3b2f15;--zone:#4a2624}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1040px;margin:0 auto;padding:28px 20px 64px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:44px 0 12px;overflow-wrap:anywhere}
h3{font-size:1rem;margin:0 0 2px}
p{margin:0 0 10px}
a{color:inherit}
.lead,.hint,small,caption{color:var(--soft)}
.hint,small{font-size:.84rem;line-height:1.4}
td small,th small{display:block;font-weight:400;overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px;
margin:0 0 16px;min-width:0}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px;margin:0 0 16px}
.pair>.card{margin:0}
.verdict{border-left:6px solid var(--line)}
.verdict.pass{border-left-color:var(--good)}
.verdict.fail{border-left-color:var(--bad)}
.verdict.inconclusive{border-left-color:var(--open)}
.verdict h3{font-size:1.1rem;display:flex;gap:10px;align-items:center;flex-wrap:wrap;margin:0 0 6px}
.verdict ul,.notes{margin:6px 0 8px;padding-left:20px}
.verdict li,.notes li{margin:0 0 4px;overflow-wrap:anywhere}
.verdict p:last-child,.card>p:last-child{margin-bottom:0}
.badge{display:inline-block;font-size:.75rem;font-weight:700;letter-spacing:.03em;line-height:1.3;
padding:2px 9px;border-radius:99px;white-space:nowrap;color:var(--soft);border:1px solid;
margin-right:3px}
.badge.pass{color:var(--good);background:var(--goodbg)}
.badge.fail{color:var(--bad);background:var(--badbg)}
.badge.inconclusive{color:var(--open);background:var(--openbg)}
.bad{color:var(--bad)}
.missing{color:var(--open)}
.scroll{overflow-x:auto;margin:0 -4px;padding:0 4px}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--quant);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:7px 12px 7px 0;border-top:1px solid var(--line)}
th:last-child,td:last-child{padding-right:0}
thead th{border-top:0;font-size:.8rem;color:var(--soft);font-weight:600;vertical-align:bottom}
tbody th{font-weight:500}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
code,.mono{font:.86em/1.45 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;
overflow-wrap:anywhere}
pre{overflow-x:auto;font:.8rem/1.45 ui-monospace,Menlo,"DejaVu Sans Mono",monospace;margin:8px 0 0}
details{margin:12px 0 0}
summary{cursor:pointer;font-size:.88rem;color:var(--soft);padding:4px 0}
figure{margin:0}
svg{display:block;width:100%;overflow:visible;margin:8px 0 0}
svg text{font-size:12px;fill:var(--ink);font-variant-numeric:tabular-nums}
svg .soft{fill:var(--soft)}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}
svg .strong{font-weight:600}
svg .axis{stroke:var(--line);stroke-width:1}
svg .rule{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:4 3}
svg .track{fill:var(--line);opacity:.55}
.candidate{fill:var(--quant);stroke:var(--quant)}
.baseline{fill:var(--float);stroke:var(--float)}
.other{fill:var(--other);stroke:var(--other)}
svg rect.candidate,svg rect.baseline,svg rect.other,svg circle{stroke:none}
svg .dot{opacity:.4}
svg .whisker{stroke-width:2}
svg .box{opacity:.28}
svg .median{stroke-width:3}
svg .zone{fill:var(--zone)}
svg .limit{stroke:var(--bad);stroke-width:2}
svg .over{fill:var(--bad)}
svg .fine{fill:var(--quant)}
svg .faint{opacity:.45}
.stage0{fill:#e0a82e}.stage1{fill:#5b8def}.stage2{fill:#c4619b}.stage3{fill:#3f9d6b}
.stage4{fill:#8a8f98}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0 0;padding:0;list-style:none;
font-size:.84rem;color:var(--soft)}
.legend svg{display:inline-block;width:11px;height:11px;margin:0 6px 0 0;vertical-align:-1px}
dl{display:grid;grid-template-columns:minmax(7em,auto) minmax(0,1fr);gap:5px 16px;margin:0;
font-size:.92rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:760px){.pair{grid-template-columns:minmax(0,1fr)}}
@media(max-width:480px){main{padding:20px 12px 48px}.card{padding:14px}h1{font-size:1.4rem}
th,td{padding-right:9px}table{font-size:.86rem}dl{grid-template-columns:minmax(0,1fr);gap:0}
dd{margin:0 0 8px}
.stacked tr{display:grid;grid-template-columns:repeat(var(--c),minmax(0,1fr));border-top:1px solid
var(--line);padding:7px 0}
.stacked th,.stacked td{border:0;padding:0 0 0 6px}
.stacked tbody th,.stacked .wide{grid-column:1/-1;padding:0 0 2px}
.stacked thead tr{border:0}.stacked thead th:first-child{display:none}
.stacked td:nth-child(2){padding-left:0}
.c2{--c:2}.c3{--c:3}.c4{--c:4}.c5{--c:5}.c6{--c:6}
.stacked .n{white-space:normal}}
@media print{body{background:#fff}.card{break-inside:avoid}}
""".strip()
